// The safetensors header parser against hostile files, and the writer against the parser.
#include "engine/checkpoint/safetensors.h"

#include <random>

#include "fmt/format.h"
#include "tests/engine/checkpoint/test_files.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

auto IsDataLoss(const std::string& text) {
  return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(text));
}

class SafetensorsTest : public testing::Test {
 protected:
  absl::StatusOr<SafetensorsHeader> Parse(std::string_view file_bytes) {
    const auto reader = FileReader::Open(dir_.Write("x.safetensors", file_bytes));
    if (!reader.ok()) return reader.status();
    return ReadSafetensorsHeader(**reader);
  }
  absl::StatusOr<SafetensorsHeader> ParseHeader(std::string_view header, size_t data_bytes) {
    return Parse(SafetensorsBytes(header, std::string(data_bytes, 'x')));
  }
  // One tensor of the given members.
  absl::StatusOr<SafetensorsHeader> ParseTensor(std::string_view dtype, std::string_view shape,
                                                std::string_view offsets, size_t data_bytes) {
    return ParseHeader(fmt::format(R"({{"a":{{"dtype":"{}","shape":{},"data_offsets":{}}}}})",
                                   dtype, shape, offsets),
                       data_bytes);
  }
  TempDir dir_;
};

constexpr std::string_view kGoodHeader =
    R"({"__metadata__":{"format":"pt","crc32c.b":"0a0b0c0d"},)"
    R"("b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},)"
    R"("a":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}  )";

TEST_F(SafetensorsTest, ReadsTensorsInTheOrderOfTheData) {
  const auto header = ParseHeader(kGoodHeader, 11);
  FQ_ASSERT_OK(header);
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].info.name, "a");
  EXPECT_EQ(header->tensors[0].info.dtype, DType::kBF16);
  EXPECT_EQ(header->tensors[0].info.shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(header->tensors[0].info.num_bytes, 8);
  EXPECT_EQ(header->tensors[0].file_offset, 8 + static_cast<int64_t>(kGoodHeader.size()));
  EXPECT_EQ(header->tensors[1].info.name, "b");
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST_F(SafetensorsTest, ScalarsAndUnalignedOffsetsAreLegal) {
  const auto header = ParseHeader(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[],"data_offsets":[1,5]}})",
      5);
  FQ_ASSERT_OK(header);
  EXPECT_EQ(header->tensors[1].info.num_bytes, 4);
}

// M2
TEST_F(SafetensorsTest, EmptyAndTinyFilesAreTruncated) {
  EXPECT_THAT(Parse(""), IsDataLoss("truncated"));
  EXPECT_THAT(Parse("1234567"), IsDataLoss("truncated"));
}

// M2
TEST_F(SafetensorsTest, EveryCutOfTheFileIsRefused) {
  const std::string file = SafetensorsBytes(kGoodHeader, std::string(11, 'x'));
  for (size_t length = 0; length < file.size(); ++length) {
    EXPECT_THAT(Parse(file.substr(0, length)), IsDataLoss("truncated")) << length;
  }
}

// M3, M28
TEST_F(SafetensorsTest, OtherFormatsAreNamedByTheirMagic) {
  const std::string rest(64, '\0');
  const auto is_unsupported = [](const std::string& name) {
    return StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("format not supported: " + name));
  };
  EXPECT_THAT(Parse("GGUF" + LittleEndian(3, 4) + rest), is_unsupported("GGUF"));
  EXPECT_THAT(Parse("GGUF" + LittleEndian(3, 4) + rest),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("flashquant quantize")));
  EXPECT_THAT(Parse("TCOO\r\n\x1a\n" + rest), is_unsupported("stand-alone Tile-COO"));
  EXPECT_THAT(Parse("PK\x03\x04\x14\x01\x08\x08" + rest), is_unsupported("zip archive"));
  EXPECT_THAT(Parse("\x80\x02}q\x01(X\x01" + rest), is_unsupported("pickle"));
  EXPECT_THAT(Parse("\x08\x07\x12\x07pytorch" + rest), is_unsupported("ONNX"));
}

// M4, M32
TEST_F(SafetensorsTest, HeaderLengthIsCheckedBeforeAnythingIsAllocated) {
  for (const uint64_t length :
       {uint64_t{1} << 63, ~uint64_t{0}, uint64_t{100'000'001}, uint64_t{2'000'000'000}}) {
    EXPECT_THAT(Parse(LittleEndian(length, 8) + "{}"), IsDataLoss("header: too large"));
  }
  EXPECT_THAT(Parse(LittleEndian(3, 8) + "{}"), IsDataLoss("header: truncated (limit 2, got 3)"));
  EXPECT_THAT(Parse(LittleEndian(99'999'999, 8) + "{}"), IsDataLoss("header: truncated"));
}

// M5
TEST_F(SafetensorsTest, HeaderMustBeCleanJson) {
  EXPECT_THAT(ParseHeader("", 0), IsDataLoss("must start with '{'"));
  EXPECT_THAT(ParseHeader(" {}", 0), IsDataLoss("must start with '{'"));
  EXPECT_THAT(ParseHeader("[]", 0), IsDataLoss("must start with '{'"));
  EXPECT_THAT(ParseHeader("{\"\xff\":1}", 0), IsDataLoss("syntax error"));
  EXPECT_THAT(ParseHeader("{\"a\":" + std::string(100'000, '[') + "}", 0),
              IsDataLoss("nested too deeply"));
  EXPECT_THAT(ParseTensor("U8", "[1e999]", "[0,1]", 1), IsDataLoss("number overflows"));
  EXPECT_THAT(
      ParseHeader(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
          1),
      IsDataLoss("duplicate key a"));
  EXPECT_THAT(ParseHeader(R"({"__metadata__":{"a":1}})", 0), IsDataLoss("must be a string"));
}

// M6
TEST_F(SafetensorsTest, NumberOfTensorsIsLimited) {
  std::string header = "{";
  for (int i = 0; i < 1'000'000; ++i) {
    header += fmt::format("{}\"{}\":{{\"dtype\":\"U8\"}}", i == 0 ? "" : ",", i);
  }
  header += "}";
  EXPECT_THAT(ParseHeader(header, 0), IsDataLoss("too many tensors (limit"));
}

// M6
TEST_F(SafetensorsTest, TensorNamesAreChecked) {
  const auto parse_name = [&](const std::string& name) {
    return ParseHeader("{\"" + name + R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1);
  };
  FQ_EXPECT_OK(parse_name("model.layers.0.weight"));
  EXPECT_THAT(parse_name(""), IsDataLoss("tensor name: empty"));
  EXPECT_THAT(parse_name(std::string(1'000'000, 'a')), IsDataLoss("tensor name: too long"));
  EXPECT_THAT(parse_name("a\\u0000b"), IsDataLoss("tensor name: illegal"));
  EXPECT_THAT(parse_name("a\\nb"), IsDataLoss("tensor name: illegal"));
  EXPECT_THAT(parse_name("../../etc/passwd"), IsDataLoss("tensor name: illegal"));
}

// M7
TEST_F(SafetensorsTest, BadShapesAreASizeOverflow) {
  for (const char* shape :
       {"[0]", "[-1]", "[9223372036854775808]", "[18446744073709551615]", "[1.5]", "[\"1\"]",
        "[4294967296,4294967296]", "[9223372036854775807,2]", "[4611686018427387904]",
        "[3037000500,3037000500]"}) {
    EXPECT_THAT(ParseTensor("F32", shape, "[0,4]", 4), IsDataLoss("tensor a: size overflow"))
        << shape;
  }
  EXPECT_THAT(ParseTensor("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]", 1), IsDataLoss("too many values"));
}

// M8
TEST_F(SafetensorsTest, OffsetsMustTileTheData) {
  const auto parse_two = [&](std::string_view first, std::string_view second) {
    return ParseHeader(fmt::format(R"({{"a":{{"dtype":"U8","shape":[4],"data_offsets":{}}},)"
                                   R"("b":{{"dtype":"U8","shape":[4],"data_offsets":{}}}}})",
                                   first, second),
                       8);
  };
  FQ_EXPECT_OK(parse_two("[0,4]", "[4,8]"));
  FQ_EXPECT_OK(parse_two("[4,8]", "[0,4]"));
  EXPECT_THAT(parse_two("[0,4]", "[3,7]"), IsDataLoss("data_offsets overlap"));
  EXPECT_THAT(parse_two("[0,4]", "[0,4]"), IsDataLoss("data_offsets overlap"));
  EXPECT_THAT(parse_two("[1,5]", "[4,8]"), IsDataLoss("leave a gap (expected 0, got 1)"));
  EXPECT_THAT(parse_two("[0,4]", "[5,9]"), IsDataLoss("past the end of the file"));
  EXPECT_THAT(parse_two("[0,4]", "[8,4]"), IsDataLoss("go backwards"));
  EXPECT_THAT(parse_two("[0,4]", "[4,18446744073709551615]"),
              IsDataLoss("past the end of the file"));
  EXPECT_THAT(parse_two("[0,4]", "[4,7]"), IsDataLoss("do not fit the shape"));
  EXPECT_THAT(parse_two("[0,4]", "[4]"), IsDataLoss("must be two offsets"));
  EXPECT_THAT(parse_two("[0,4]", "[-4,0]"), IsDataLoss("must be two offsets"));
}

// M9
TEST_F(SafetensorsTest, TrailingBytesAreRefused) {
  EXPECT_THAT(ParseTensor("U8", "[4]", "[0,4]", 5),
              IsDataLoss("trailing bytes after the last tensor (limit 4, got 5)"));
  EXPECT_THAT(ParseHeader("{}", 1), IsDataLoss("trailing bytes"));
  FQ_EXPECT_OK(ParseHeader("{}", 0));
}

// M10
TEST_F(SafetensorsTest, UnknownDtypeIsUnimplemented) {
  for (const char* dtype : {"F8_E4M3", "bf16", "F33"}) {
    EXPECT_THAT(ParseTensor(dtype, "[1]", "[0,1]", 1),
                StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("unsupported dtype")));
  }
  EXPECT_THAT(ParseTensor("", "[1]", "[0,1]", 1),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("unsupported dtype")));
}

TEST_F(SafetensorsTest, MissingMembersAreNamed) {
  EXPECT_THAT(ParseHeader(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1),
              IsDataLoss("tensor a: dtype: missing"));
  EXPECT_THAT(ParseHeader(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1),
              IsDataLoss("tensor a: shape: missing"));
  EXPECT_THAT(ParseHeader(R"({"a":{"dtype":"U8","shape":[1]}})", 1),
              IsDataLoss("tensor a: data_offsets: missing"));
  EXPECT_THAT(ParseHeader(R"({"a":5})", 1), IsDataLoss("must be an object"));
}

// Whatever one byte of the header becomes, the parser answers; when it accepts, all is in the file.
TEST_F(SafetensorsTest, AnyChangedByteIsRefusedOrStaysInsideTheFile) {
  const std::string file = SafetensorsBytes(kGoodHeader, std::string(11, 'x'));
  std::mt19937 random(7);
  for (size_t i = 0; i < 8 + kGoodHeader.size(); ++i) {
    std::string changed = file;
    changed[i] = static_cast<char>(changed[i] ^ (1 + random() % 255));
    const auto header = Parse(changed);
    if (!header.ok()) continue;
    int64_t end = static_cast<int64_t>(file.size()) - 11;
    for (const SafetensorsTensor& tensor : header->tensors) {
      EXPECT_EQ(tensor.file_offset, end);
      end += tensor.info.num_bytes;
    }
    EXPECT_EQ(end, static_cast<int64_t>(file.size()));
  }
}

TEST_F(SafetensorsTest, WriterStatesSizesAndChecksumsThatTheParserReadsBack) {
  const std::string path = dir_.File("w.safetensors");
  const std::vector<uint8_t> a = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<uint8_t> b = {'1', '2', '3', '4', '5', '6', '7', '8', '9'};
  auto writer = SafetensorsWriter::Create(path);
  FQ_ASSERT_OK(writer);
  FQ_ASSERT_OK((*writer)->Begin("z.first", DType::kBF16, std::vector<int64_t>{2, 2}));
  FQ_ASSERT_OK((*writer)->Append(std::span(a).first(3)));
  FQ_ASSERT_OK((*writer)->Append(std::span(a).subspan(3)));
  FQ_ASSERT_OK((*writer)->Begin("a.second", DType::kU8, std::vector<int64_t>{9}));
  FQ_ASSERT_OK((*writer)->Append(b));
  FQ_ASSERT_OK((*writer)->Finish());
  EXPECT_FALSE(std::filesystem::exists(path + ".data"));

  const std::string file = ReadAll(path);
  const auto header = Parse(file);
  FQ_ASSERT_OK(header);
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].info.name, "z.first");
  EXPECT_EQ(header->tensors[0].info.shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(header->tensors[0].file_offset % 8, 0);
  EXPECT_EQ(header->metadata.at("crc32c.a.second"), "e3069283");  // the CRC's published check value
  EXPECT_EQ(file.substr(static_cast<size_t>(header->tensors[1].file_offset)), "123456789");
}

TEST_F(SafetensorsTest, WriterRefusesBytesThatDoNotFitTheShape) {
  auto writer = SafetensorsWriter::Create(dir_.File("w"));
  FQ_ASSERT_OK(writer);
  const std::vector<uint8_t> bytes(5);
  const std::vector<int64_t> shape = {4};
  EXPECT_FALSE((*writer)->Append(bytes).ok());
  FQ_ASSERT_OK((*writer)->Begin("a", DType::kU8, shape));
  EXPECT_FALSE((*writer)->Append(bytes).ok());
  EXPECT_FALSE((*writer)->Finish().ok());
  EXPECT_FALSE((*writer)->Begin("b", DType::kU8, shape).ok());
}

}  // namespace
}  // namespace flashquant
