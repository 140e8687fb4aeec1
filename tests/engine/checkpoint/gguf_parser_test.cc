// The GGUF header parser: one bad file per field, every cut, every changed byte.
#include <algorithm>
#include <random>

#include "engine/checkpoint/gguf_file.h"
#include "tests/engine/checkpoint/gguf_builder.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

auto IsDataLoss(const std::string& text) {
  return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(text));
}

class GgufParserTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<GgufFile>> Open(std::string_view bytes) {
    return GgufFile::Open(dir_.Write("m.gguf", bytes));
  }
  absl::StatusOr<std::unique_ptr<GgufFile>> Open(const GgufBuilder& gguf) {
    return Open(gguf.Build());
  }
  TempDir dir_;
};

TEST_F(GgufParserTest, ReadsKeysOfEveryType) {
  GgufBuilder gguf;
  gguf.AddRaw("u8", 0, "\xff")
      .AddRaw("i8", 1, "\xff")
      .AddRaw("u16", 2, "\x01\x02")
      .AddRaw("i16", 3, "\xfe\xff")
      .AddInt("u32", 4'000'000'000u)
      .AddRaw("i32", 5, "\xff\xff\xff\xff")
      .AddFloat("f32", 1e-5f)
      .AddBool("bool", true)
      .AddString("string", "text")
      .AddRaw("u64", 10, LittleEndian(INT64_MAX, 8))
      .AddRaw("i64", 11, LittleEndian(static_cast<uint64_t>(-7), 8))
      .AddRaw("f64", 12, LittleEndian(std::bit_cast<uint64_t>(0.25), 8))
      .AddStrings("strings", {"a", "", "b c"})
      .AddInts("ints", {3, -1});
  const auto file = Open(gguf);
  FQ_ASSERT_OK(file);
  const auto get_int = [&](const char* key) { return *(*file)->GetInt(key, INT64_MIN, INT64_MAX); };
  EXPECT_EQ(get_int("u8"), 255);
  EXPECT_EQ(get_int("i8"), -1);
  EXPECT_EQ(get_int("u16"), 0x201);
  EXPECT_EQ(get_int("i16"), -2);
  EXPECT_EQ(get_int("u32"), 4'000'000'000);
  EXPECT_EQ(get_int("i32"), -1);
  EXPECT_EQ(get_int("u64"), INT64_MAX);
  EXPECT_EQ(get_int("i64"), -7);
  EXPECT_EQ(*(*file)->GetDouble("f32", 0, 1), 1e-5);
  EXPECT_EQ(*(*file)->GetDouble("f64", 0, 1), 0.25);
  EXPECT_EQ(*(*file)->GetBoolOr("bool", false), true);
  EXPECT_EQ(*(*file)->GetString("string"), "text");
  EXPECT_EQ(**(*file)->GetStrings("strings"), (std::vector<std::string>{"a", "", "b c"}));
  EXPECT_EQ(**(*file)->GetInts("ints"), (std::vector<int64_t>{3, -1}));
}

TEST_F(GgufParserTest, TypedAccessNamesKeyAndLimit) {
  const auto file = Open(GgufBuilder().AddInt("n", 5).AddString("s", "x").AddFloat("f", NAN));
  FQ_ASSERT_OK(file);
  EXPECT_THAT((*file)->GetInt("n", 6, 9), IsDataLoss("n: out of range (limit 6..9, got 5)"));
  EXPECT_THAT((*file)->GetInt("s", 6, 9), IsDataLoss("s: must be an integer"));
  EXPECT_THAT((*file)->GetInt("absent", 6, 9), IsDataLoss("absent: missing"));
  EXPECT_THAT((*file)->GetDouble("f", 0, 9), IsDataLoss("f: out of range"));
  EXPECT_THAT((*file)->GetStrings("n"), IsDataLoss("n: must be an array of strings"));
  EXPECT_EQ(*(*file)->GetIntOr("absent", 3, 6, 9), 3);
  EXPECT_EQ(*(*file)->GetStringOr("absent", "d"), "d");
}

TEST_F(GgufParserTest, ReadsTensorsWithShapesReversed) {
  GgufBuilder gguf;
  gguf.AddF32("b", {3, 2}, {1, 2, 3, 4, 5, 6}).AddTensor("a", {32, 2}, 8, std::string(68, 'q'));
  const auto file = Open(gguf);
  FQ_ASSERT_OK(file);
  ASSERT_EQ((*file)->tensors().size(), 2u);
  const GgufTensor* const a = (*file)->FindTensor("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->shape, (std::vector<int64_t>{2, 32}));
  EXPECT_EQ(a->num_bytes, 68);
  EXPECT_EQ(a->row_bytes, 34);
  EXPECT_EQ((*file)->FindTensor("b")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ((*file)->FindTensor("c"), nullptr);
}

// M2
TEST_F(GgufParserTest, EveryCutOfTheFileIsRefused) {
  const std::string file = TinyLlamaGguf().Build();
  FQ_ASSERT_OK(Open(file));
  const size_t header = TinyLlamaGguf().header_bytes();
  for (size_t length = 0; length < header; ++length) {
    EXPECT_FALSE(Open(file.substr(0, length)).ok()) << length;
  }
  for (size_t i = 0; i < 64; ++i) {
    const size_t length = header + (file.size() - header) * i / 64;
    EXPECT_THAT(Open(file.substr(0, length)), IsDataLoss("truncated")) << length;
  }
}

// M3
TEST_F(GgufParserTest, MagicAndVersionAreChecked) {
  GgufBuilder gguf;
  gguf.magic = "GGML";
  EXPECT_THAT(Open(gguf), IsDataLoss("wrong magic"));
  gguf.magic = "GGUF";
  for (const uint32_t version : {0u, 1u, 4u, 0x03000000u}) {
    gguf.version = version;
    EXPECT_THAT(Open(gguf),
                StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("unsupported version")));
  }
  gguf.version = 2;
  FQ_EXPECT_OK(Open(gguf));
}

// M6
TEST_F(GgufParserTest, CountsAreCheckedBeforeAnythingIsAllocated) {
  GgufBuilder gguf;
  for (const uint64_t count : {uint64_t{100'001}, uint64_t{1} << 63, ~uint64_t{0}}) {
    gguf.num_tensors = count;
    EXPECT_THAT(Open(gguf), IsDataLoss("too many tensors"));
  }
  gguf.num_tensors = 0;
  for (const uint64_t count : {uint64_t{65'537}, ~uint64_t{0}}) {
    gguf.num_keys = count;
    EXPECT_THAT(Open(gguf), IsDataLoss("too many keys"));
  }
  gguf.num_keys = 1;
  EXPECT_THAT(Open(gguf), IsDataLoss("truncated"));
}

TEST_F(GgufParserTest, StringsAreNoLongerThanTheFile) {
  for (const uint64_t length : {uint64_t{1000}, uint64_t{1} << 63, ~uint64_t{0}}) {
    EXPECT_THAT(Open(GgufBuilder().AddRaw("k", 8, LittleEndian(length, 8) + "abc")),
                IsDataLoss("string too long"));
  }
  GgufBuilder long_key;
  long_key.AddInt(std::string(65'536, 'k'), 1);
  EXPECT_THAT(Open(long_key), IsDataLoss("string too long (limit 65535"));
}

TEST_F(GgufParserTest, ArraysAreNoLongerThanTheFileAndOfKnownType) {
  const auto array = [](uint32_t type, uint64_t count, std::string_view rest) {
    return LittleEndian(type, 4) + LittleEndian(count, 8) + std::string(rest);
  };
  for (const uint32_t type : {0u, 4u, 8u, 12u}) {
    for (const uint64_t count : {uint64_t{100}, uint64_t{1} << 61, ~uint64_t{0}}) {
      EXPECT_THAT(Open(GgufBuilder().AddRaw("k", 9, array(type, count, "12345678"))),
                  IsDataLoss("array too long"));
    }
  }
  EXPECT_THAT(Open(GgufBuilder().AddRaw("k", 9, array(13, 1, "12345678"))),
              IsDataLoss("array of value type 13"));
  EXPECT_THAT(Open(GgufBuilder().AddRaw("k", 9, array(9, 1, array(0, 1, "1")))),
              IsDataLoss("array of value type 9"));
  EXPECT_THAT(Open(GgufBuilder().AddRaw("k", 13, "12345678")), IsDataLoss("unknown value type 13"));
}

TEST_F(GgufParserTest, ValuesOutOfRangeAreRefused) {
  EXPECT_THAT(Open(GgufBuilder().AddRaw("k", 7, "\x02")), IsDataLoss("truth value"));
  EXPECT_THAT(Open(GgufBuilder().AddRaw("k", 10, LittleEndian(uint64_t{1} << 63, 8))),
              IsDataLoss("integer beyond"));
  EXPECT_THAT(Open(GgufBuilder().AddInt("k", 1).AddInt("k", 2)), IsDataLoss("duplicate key k"));
}

TEST_F(GgufParserTest, AlignmentIsABoundedPowerOfTwo) {
  for (const uint32_t alignment : {0u, 3u, 48u, 131'072u, 0x80000000u}) {
    EXPECT_THAT(Open(GgufBuilder().AddInt("general.alignment", alignment)),
                IsDataLoss("general.alignment"));
  }
  EXPECT_THAT(Open(GgufBuilder().AddString("general.alignment", "32")),
              IsDataLoss("general.alignment"));
  GgufBuilder gguf;
  gguf.alignment = 64;
  gguf.AddInt("general.alignment", 64).AddF32("a", {1}, {1}).AddF32("b", {1}, {2});
  FQ_EXPECT_OK(Open(gguf));
}

// M6
TEST_F(GgufParserTest, TensorNamesAreCheckedAndUnique) {
  EXPECT_THAT(Open(GgufBuilder().AddF32("", {1}, {1})), IsDataLoss("tensor name: empty"));
  EXPECT_THAT(Open(GgufBuilder().AddF32("../a", {1}, {1})), IsDataLoss("tensor name: illegal"));
  EXPECT_THAT(Open(GgufBuilder().AddF32(std::string("a\0b", 3), {1}, {1})),
              IsDataLoss("tensor name: illegal"));
  EXPECT_THAT(Open(GgufBuilder().AddF32(std::string(1025, 'a'), {1}, {1})),
              IsDataLoss("string too long"));
  EXPECT_THAT(Open(GgufBuilder().AddF32("a", {1}, {1}).AddF32("a", {1}, {1})),
              IsDataLoss("tensor a: duplicate name"));
}

// M7
TEST_F(GgufParserTest, ShapesAreChecked) {
  const auto open = [&](const std::vector<uint64_t>& dims, uint32_t type) {
    return Open(GgufBuilder().AddTensor("a", dims, type, std::string(4, 'x')));
  };
  EXPECT_THAT(open({}, 0), IsDataLoss("dimensions (limit 1..4, got 0)"));
  EXPECT_THAT(open({1, 1, 1, 1, 1}, 0), IsDataLoss("dimensions (limit 1..4, got 5)"));
  EXPECT_THAT(open({0}, 0), IsDataLoss("size overflow"));
  EXPECT_THAT(open({uint64_t{1} << 63}, 0), IsDataLoss("size overflow"));
  EXPECT_THAT(open({~uint64_t{0}}, 0), IsDataLoss("size overflow"));
  EXPECT_THAT(open({uint64_t{1} << 32, uint64_t{1} << 32}, 0), IsDataLoss("size overflow"));
  EXPECT_THAT(open({uint64_t{1} << 61, 1}, 0), IsDataLoss("size overflow"));
  EXPECT_THAT(open({uint64_t{1} << 62, uint64_t{1} << 62, uint64_t{1} << 62, 1}, 0),
              IsDataLoss("size overflow"));
  EXPECT_THAT(open({uint64_t{1} << 40}, 0), IsDataLoss("truncated"));
  EXPECT_THAT(open({33, 1}, 8), IsDataLoss("Q8_0 needs a multiple of 32 columns (got 33)"));
  EXPECT_THAT(open({128, 1}, 14), IsDataLoss("Q6_K needs a multiple of 256 columns (got 128)"));
}

// M10
TEST_F(GgufParserTest, OtherTensorTypesAreNamedAndUnimplemented) {
  const auto is_unimplemented = [](const char* text) {
    return StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(text));
  };
  const auto open = [&](uint32_t type) {
    return Open(GgufBuilder().AddTensor("a", {256, 1}, type, std::string(4, 'x')));
  };
  EXPECT_THAT(open(12), is_unimplemented("tensor a: Q4_K (12) is not imported"));
  EXPECT_THAT(open(4), is_unimplemented("type 4 (4) is not imported"));
  EXPECT_THAT(open(31), is_unimplemented("an unknown type (31)"));
  EXPECT_THAT(open(~0u), is_unimplemented("an unknown type (4294967295)"));
}

// M8
TEST_F(GgufParserTest, OffsetsMustFollowEachOther) {
  const auto open = [&](uint64_t first, uint64_t second) {
    GgufBuilder gguf;
    gguf.AddF32("data", {16}, std::vector<float>(16));  // 64 bytes at 0
    gguf.AddTensorAt("a", {1}, 0, first).AddTensorAt("b", {1}, 0, second);
    return Open(gguf.Build() + std::string(64, '\0'));
  };
  FQ_EXPECT_OK(open(64, 96));
  FQ_EXPECT_OK(open(96, 64));
  EXPECT_THAT(open(32, 96), IsDataLoss("overlaps"));
  EXPECT_THAT(open(64, 64), IsDataLoss("overlaps"));
  EXPECT_THAT(open(64, 100), IsDataLoss("leaves a gap"));
  EXPECT_THAT(open(64, 128), IsDataLoss("leaves a gap"));
  EXPECT_THAT(open(64, uint64_t{1} << 40), IsDataLoss("truncated"));
  EXPECT_THAT(open(64, ~uint64_t{0}), IsDataLoss("truncated"));
}

// M9
TEST_F(GgufParserTest, TrailingBytesAreRefused) {
  EXPECT_THAT(Open(TinyLlamaGguf().Build() + "x"), IsDataLoss("trailing bytes"));
}

TEST_F(GgufParserTest, LastTensorNeedsNoPadding) {
  GgufBuilder gguf;
  gguf.AddF32("a", {1}, {1});
  const std::string file = gguf.Build();
  FQ_EXPECT_OK(Open(file.substr(0, file.size() - 28)));
  EXPECT_THAT(Open(file.substr(0, file.size() - 29)), IsDataLoss("truncated"));
}

// Whatever one byte of the header becomes, the parser answers; when it accepts, all is in the file.
TEST_F(GgufParserTest, AnyChangedByteIsRefusedOrStaysInsideTheFile) {
  const std::string file = TinyLlamaGguf().Build();
  const size_t header_bytes = TinyLlamaGguf().header_bytes();
  std::mt19937 random(7);
  for (size_t i = 0; i < header_bytes; ++i) {
    std::string changed = file;
    changed[i] = static_cast<char>(changed[i] ^ static_cast<char>(1 + random() % 255));
    const auto opened = Open(changed);
    if (!opened.ok()) continue;
    for (const GgufTensor& tensor : (*opened)->tensors()) {
      EXPECT_GE(tensor.file_offset, 0);
      EXPECT_LE(tensor.file_offset + tensor.num_bytes, static_cast<int64_t>(file.size()));
    }
  }
}

}  // namespace
}  // namespace flashquant
