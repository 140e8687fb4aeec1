// Model folders: one file or shards, hostile indexes, other formats, reading of tensors.
#include "engine/checkpoint/checkpoint.h"

#include <sys/stat.h>

#include <filesystem>

#include "fmt/format.h"
#include "kernels/base/bfloat16.h"
#include "kernels/base/crc32c.h"
#include "tests/engine/checkpoint/test_files.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

auto IsDataLoss(const std::string& text) {
  return StatusIs(absl::StatusCode::kDataLoss, HasSubstr(text));
}
auto IsUnimplemented(const std::string& text) {
  return StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(text));
}

// A file with one U8 tensor of the given bytes.
std::string OneTensor(std::string_view name, std::string_view data, std::string_view crc = "") {
  const std::string metadata =
      crc.empty() ? "" : fmt::format(R"("__metadata__":{{"crc32c.{}":"{}"}},)", name, crc);
  return SafetensorsBytes(
      fmt::format(R"({{{}"{}":{{"dtype":"U8","shape":[{}],"data_offsets":[0,{}]}}}})", metadata,
                  name, data.size(), data.size()),
      data);
}

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest() { dir_.Write("config.json", R"({"hidden_size": 4})"); }
  void WriteIndex(std::string_view weight_map) {
    dir_.Write("model.safetensors.index.json",
               fmt::format(R"({{"metadata":{{}},"weight_map":{}}})", weight_map));
  }
  absl::Status OpenStatus() { return OpenCheckpoint(dir_.path()).status(); }
  TempDir dir_;
};

TEST_F(CheckpointTest, OpensASingleFile) {
  dir_.Write("model.safetensors", OneTensor("a", "1234"));
  const auto checkpoint = OpenCheckpoint(dir_.path());
  FQ_ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->config["hidden_size"], 4);
  EXPECT_EQ(checkpoint->generation_config.dump(), "{}");
  const auto bytes = checkpoint->tensors->ReadBytes("a");
  FQ_ASSERT_OK(bytes);
  EXPECT_EQ(std::string(bytes->begin(), bytes->end()), "1234");
  // M11
  EXPECT_THAT(checkpoint->tensors->ReadBytes("b"), IsDataLoss("missing tensor b"));
}

TEST_F(CheckpointTest, OpensShardsAndSortsTheirTensorsByName) {
  dir_.Write("x-1.safetensors", OneTensor("b", "1234"));
  dir_.Write("x-2.safetensors", OneTensor("a", "56"));
  dir_.Write("generation_config.json", R"({"eos_token_id": 2})");
  WriteIndex(R"({"a":"x-2.safetensors","b":"x-1.safetensors"})");
  const auto checkpoint = OpenCheckpoint(dir_.path());
  FQ_ASSERT_OK(checkpoint);
  EXPECT_EQ(checkpoint->generation_config["eos_token_id"], 2);
  ASSERT_EQ(checkpoint->tensors->tensors().size(), 2u);
  EXPECT_EQ(checkpoint->tensors->tensors()[0].name, "a");
  EXPECT_EQ(checkpoint->tensors->ReadBytes("b")->size(), 4u);
  EXPECT_EQ((*checkpoint->tensors->ReadBytes("a"))[1], '6');
}

// M1
TEST_F(CheckpointTest, MissingFolderConfigAndTensorsAreNotFound) {
  EXPECT_THAT(OpenStatus(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("model.safetensors")));
  EXPECT_THAT(OpenCheckpoint(dir_.File("none")).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
  std::filesystem::remove(dir_.File("config.json"));
  dir_.Write("model.safetensors", OneTensor("a", "1234"));
  EXPECT_THAT(OpenStatus(), StatusIs(absl::StatusCode::kNotFound,
                                     HasSubstr("not a model folder (it has no config.json)")));
}

// M1
TEST_F(CheckpointTest, FifoInPlaceOfAFileIsRefusedWithoutHanging) {
  ASSERT_EQ(::mkfifo(dir_.File("model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(OpenStatus(), IsDataLoss("not a regular file"));
}

// M5
TEST_F(CheckpointTest, ConfigMustBeAnObjectOfBoundedSize) {
  dir_.Write("model.safetensors", OneTensor("a", "1234"));
  dir_.Write("config.json", "[]");
  EXPECT_THAT(OpenStatus(), IsDataLoss("must be an object"));
  dir_.Write("config.json", "{\"a\":1,\"a\":2}");
  EXPECT_THAT(OpenStatus(), IsDataLoss("duplicate key a"));
  dir_.Write("config.json", "{" + std::string(5 << 20, ' ') + "}");
  EXPECT_THAT(OpenStatus(), IsDataLoss("file too large"));
}

// M19
TEST_F(CheckpointTest, ShardPathsMustBePlainNamesInTheFolder) {
  dir_.Write("sub/x.safetensors", OneTensor("a", "1234"));
  dir_.Write("x.safetensors", OneTensor("a", "1234"));
  for (const std::string& path :
       {std::string("../x.safetensors"), dir_.File("x.safetensors"),
        std::string("sub/x.safetensors"), std::string("./x.safetensors"), std::string(""),
        std::string(".safetensors"), std::string("config.json"), std::string("x\\ny.safetensors"),
        std::string(300, 'x') + ".safetensors"}) {
    WriteIndex(fmt::format(R"({{"a":"{}"}})", path));
    EXPECT_THAT(OpenStatus(), IsDataLoss("a: shard path")) << path;
  }
  WriteIndex(R"({"a":5})");
  EXPECT_THAT(OpenStatus(), IsDataLoss("a: shard path"));
  WriteIndex(R"({"a":"x.safetensors"})");
  FQ_EXPECT_OK(OpenStatus());
}

// M19
TEST_F(CheckpointTest, SymbolicLinkOutOfTheFolderIsRefused) {
  const TempDir elsewhere;
  elsewhere.Write("x.safetensors", OneTensor("a", "1234"));
  std::filesystem::create_symlink(elsewhere.File("x.safetensors"), dir_.File("x.safetensors"));
  WriteIndex(R"({"a":"x.safetensors"})");
  EXPECT_THAT(OpenStatus(), IsDataLoss("shard path: leads out of the folder"));
  std::filesystem::remove(dir_.File("model.safetensors.index.json"));
  std::filesystem::rename(dir_.File("x.safetensors"), dir_.File("model.safetensors"));
  EXPECT_THAT(OpenStatus(), IsDataLoss("shard path: leads out of the folder"));
}

TEST_F(CheckpointTest, LinksOfAHuggingFaceCacheAreFollowed) {
  const std::string snapshot = dir_.path() + "/snapshots/abc";
  dir_.Write("blobs/0123", OneTensor("a", "1234"));
  dir_.Write("snapshots/abc/config.json", "{}");
  std::filesystem::create_symlink("../../blobs/0123", snapshot + "/model.safetensors");
  FQ_EXPECT_OK(OpenCheckpoint(snapshot));
}

// M20
TEST_F(CheckpointTest, MissingShardIsNotFound) {
  WriteIndex(R"({"a":"x-1.safetensors"})");
  EXPECT_THAT(OpenStatus(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("x-1.safetensors")));
}

// M20
TEST_F(CheckpointTest, SameTensorInTwoShardsIsRefused) {
  dir_.Write("x-1.safetensors", OneTensor("a", "1234"));
  dir_.Write("x-2.safetensors", OneTensor("a", "1234"));
  WriteIndex(R"({"a":"x-1.safetensors","b":"x-2.safetensors"})");
  EXPECT_THAT(OpenStatus(), IsDataLoss("tensor a: also in"));
}

// M11
TEST_F(CheckpointTest, IndexMustAgreeWithTheShards) {
  dir_.Write("x-1.safetensors", OneTensor("a", "1234"));
  dir_.Write("x-2.safetensors", OneTensor("b", "1234"));
  WriteIndex(R"({"a":"x-1.safetensors","b":"x-2.safetensors","c":"x-2.safetensors"})");
  EXPECT_THAT(OpenStatus(), IsDataLoss("missing tensor c"));
  WriteIndex(R"({"a":"x-2.safetensors","b":"x-1.safetensors"})");
  EXPECT_THAT(OpenStatus(), IsDataLoss("missing tensor a"));
  WriteIndex("{}");
  EXPECT_THAT(OpenStatus(), IsDataLoss("weight_map: empty"));
}

// M28
TEST_F(CheckpointTest, OtherFormatsAreRefusedByName) {
  const std::string gguf =
      dir_.Write("other/m.gguf", "GGUF" + LittleEndian(3, 4) + std::string(60, '\0'));
  EXPECT_THAT(OpenCheckpoint(gguf).status(), IsUnimplemented("flashquant quantize"));
  EXPECT_THAT(OpenCheckpoint(dir_.path() + "/other").status(), IsUnimplemented("GGUF"));
  const std::string pickle = dir_.Write("p/pytorch_model.bin", "\x80\x02" + std::string(64, 'q'));
  EXPECT_THAT(OpenCheckpoint(pickle).status(), IsUnimplemented("pickle"));
  EXPECT_THAT(OpenCheckpoint(dir_.path() + "/p").status(),
              IsUnimplemented("pytorch_model.bin: format not supported"));
  EXPECT_THAT(OpenCheckpoint(dir_.Write("text", "hello")).status(), IsDataLoss("not a model"));
  dir_.Write("model.safetensors", "GGUF" + LittleEndian(3, 4) + std::string(60, '\0'));
  EXPECT_THAT(OpenStatus(), IsUnimplemented("format not supported: GGUF"));
}

// M21
TEST_F(CheckpointTest, ChecksumOfScalesIsComparedAtEveryRead) {
  const std::string data = "123456789";
  dir_.Write("model.safetensors", OneTensor("p.scales", data, "e3069283"));
  auto checkpoint = OpenCheckpoint(dir_.path());
  FQ_ASSERT_OK(checkpoint);
  FQ_EXPECT_OK(checkpoint->tensors->ReadBytes("p.scales"));
  for (size_t i = 0; i < data.size(); ++i) {
    std::string changed = data;
    changed[i] = static_cast<char>(changed[i] ^ 0x10);
    dir_.Write("model.safetensors", OneTensor("p.scales", changed, "e3069283"));
    checkpoint = OpenCheckpoint(dir_.path());
    FQ_ASSERT_OK(checkpoint);
    EXPECT_THAT(checkpoint->tensors->ReadBytes("p.scales"),
                IsDataLoss("tensor p.scales: checksum (stated e3069283, got"));
  }
}

// M21
TEST_F(CheckpointTest, ChecksumOfOtherTensorsIsComparedOnRequest) {
  dir_.Write("model.safetensors", OneTensor("p.qweight", "123456788", "e3069283"));
  const auto checkpoint = OpenCheckpoint(dir_.path());
  FQ_ASSERT_OK(checkpoint);
  const TensorInfo* const info = checkpoint->tensors->Find("p.qweight");
  ASSERT_NE(info, nullptr);
  EXPECT_EQ(checkpoint->tensors->StoredChecksum(*info), 0xe3069283u);
  FQ_EXPECT_OK(checkpoint->tensors->ReadBytes("p.qweight"));
  EXPECT_THAT(checkpoint->tensors->VerifyChecksum(*info), IsDataLoss("p.qweight: checksum"));
}

TEST_F(CheckpointTest, VerifyReadsLargeTensorsInPieces) {
  const std::string data(3'000'001, 'q');
  const uint32_t crc = Crc32c(data.data(), data.size());
  dir_.Write("model.safetensors", OneTensor("w", data, fmt::format("{:08x}", crc)));
  const auto checkpoint = OpenCheckpoint(dir_.path());
  FQ_ASSERT_OK(checkpoint);
  FQ_EXPECT_OK(checkpoint->tensors->VerifyChecksum(*checkpoint->tensors->Find("w")));
}

// M21
TEST_F(CheckpointTest, ChecksumMustBeEightLowerCaseHexDigits) {
  for (const char* crc : {"e306928", "E3069283", "0xe30692", "e3069283 ", "-3069283"}) {
    dir_.Write("model.safetensors", OneTensor("a", "123456789", crc));
    EXPECT_THAT(OpenStatus(), IsDataLoss("checksum of tensor a (need 8 hex digits")) << crc;
  }
}

// M22
TEST_F(CheckpointTest, FileCutAfterOpeningGivesAnErrorNotASignal) {
  const std::string path = dir_.Write("model.safetensors", OneTensor("a", std::string(100, 'x')));
  const auto checkpoint = OpenCheckpoint(dir_.path());
  FQ_ASSERT_OK(checkpoint);
  std::filesystem::resize_file(path, 90);
  EXPECT_THAT(checkpoint->tensors->ReadBytes("a"), IsDataLoss("changed while being read"));
}

TEST_F(CheckpointTest, RowsAreReadAsStoredAndAsFloat) {
  std::string data;
  for (const float value : {1.0f, -2.0f, 0.5f, 3.0f, 1e30f, -0.0f}) {
    data += LittleEndian(ToBFloat16(value).bits, 2);
  }
  for (const float value : {1.5f, -2.0f}) data += LittleEndian(ToHalf(value).bits, 2);
  data += LittleEndian(std::bit_cast<uint32_t>(3.25f), 4);
  dir_.Write("model.safetensors",
             SafetensorsBytes(R"({"b":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},)"
                              R"("h":{"dtype":"F16","shape":[2],"data_offsets":[12,16]},)"
                              R"("f":{"dtype":"F32","shape":[1],"data_offsets":[16,20]}})",
                              data));
  const auto checkpoint = OpenCheckpoint(dir_.path());
  FQ_ASSERT_OK(checkpoint);
  const TensorSource& tensors = *checkpoint->tensors;
  std::vector<float> values(4);
  FQ_ASSERT_OK(tensors.ReadRowsAsFloat(*tensors.Find("b"), 1, 2, values.data()));
  EXPECT_EQ(values, (std::vector<float>{0.5f, 3.0f, ToFloat(ToBFloat16(1e30f)), -0.0f}));
  FQ_ASSERT_OK(tensors.ReadRowsAsFloat(*tensors.Find("h"), 0, 2, values.data()));
  EXPECT_EQ(values[0], 1.5f);
  EXPECT_EQ(values[1], -2.0f);
  FQ_ASSERT_OK(tensors.ReadRowsAsFloat(*tensors.Find("f"), 0, 1, values.data()));
  EXPECT_EQ(values[0], 3.25f);
  EXPECT_FALSE(tensors.ReadRows(*tensors.Find("b"), 2, 2, values.data()).ok());
  EXPECT_FALSE(tensors.ReadRows(*tensors.Find("b"), -1, 1, values.data()).ok());
}

// M10
TEST_F(CheckpointTest, IntegersAreNotReadAsFloat) {
  dir_.Write("model.safetensors", OneTensor("a", "1234"));
  const auto checkpoint = OpenCheckpoint(dir_.path());
  FQ_ASSERT_OK(checkpoint);
  float value = 0;
  EXPECT_THAT(checkpoint->tensors->ReadRowsAsFloat(*checkpoint->tensors->Find("a"), 0, 1, &value),
              IsDataLoss("dtype (need F32, F16 or BF16, got U8)"));
}

TEST(TinyModelsTest, OpenWithAllTheirTensors) {
  for (const char* name : {"tiny_models/llama", "tiny_models/llama3-rope"}) {
    const auto checkpoint = OpenCheckpoint(TestDataPath(name));
    FQ_ASSERT_OK(checkpoint);
    const TensorInfo* const embedding = checkpoint->tensors->Find("model.embed_tokens.weight");
    ASSERT_NE(embedding, nullptr);
    EXPECT_EQ(embedding->shape, (std::vector<int64_t>{512, 128}));
    EXPECT_EQ(embedding->dtype, DType::kBF16);
    EXPECT_EQ(checkpoint->config["tie_word_embeddings"].get<bool>(),
              checkpoint->tensors->Find("lm_head.weight") == nullptr);
  }
}

TEST(StoryModelTest, OpensFromThreeShards) {
  FQ_SKIP_WITHOUT_SHARED_DATA("models/story-22m");
  const auto checkpoint = OpenCheckpoint(SharedDataPath("models/story-22m"));
  FQ_ASSERT_OK(checkpoint);
  int64_t num_bytes = 0;
  for (const TensorInfo& tensor : checkpoint->tensors->tensors()) num_bytes += tensor.num_bytes;
  EXPECT_EQ(num_bytes, 44'059'392);  // total_size of its index
}

}  // namespace
}  // namespace flashquant
