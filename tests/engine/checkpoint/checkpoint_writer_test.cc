// Output folders: whole or not there, sharded, read back; every way in which writing can fail.
#include "engine/checkpoint/checkpoint_writer.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "engine/checkpoint/checkpoint.h"
#include "tests/engine/checkpoint/test_files.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

std::vector<std::string> NamesIn(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

const std::vector<uint8_t> kBytes = {1, 2, 3, 4};

TEST(CheckpointWriterTest, FolderAppearsAtFinishAndLoads) {
  const TempDir dir;
  auto writer = CheckpointWriter::Create(dir.File("out/"));
  FQ_ASSERT_OK(writer);
  FQ_ASSERT_OK((*writer)->AddTensor("a", DType::kU8, {4}, kBytes));
  FQ_ASSERT_OK((*writer)->WriteTextFile("tokenizer.json", "{}"));
  EXPECT_FALSE(std::filesystem::exists(dir.File("out")));
  EXPECT_EQ((*writer)->tensor_bytes(), 4);
  FQ_ASSERT_OK((*writer)->Finish({{"hidden_size", 4}}));
  writer->reset();

  EXPECT_THAT(NamesIn(dir.path()), SizeIs(1));
  EXPECT_THAT(NamesIn(dir.File("out")),
              testing::UnorderedElementsAre("config.json", "model.safetensors", "tokenizer.json"));
  const auto checkpoint = OpenCheckpoint(dir.File("out"));
  FQ_ASSERT_OK(checkpoint);
  EXPECT_EQ(*checkpoint->tensors->ReadBytes("a"), kBytes);
  EXPECT_EQ(checkpoint->config["hidden_size"], 4);
}

TEST(CheckpointWriterTest, NothingRemainsWithoutFinish) {
  const TempDir dir;
  {
    auto writer = CheckpointWriter::Create(dir.File("out"));
    FQ_ASSERT_OK(writer);
    FQ_ASSERT_OK((*writer)->AddTensor("a", DType::kU8, {4}, kBytes));
    EXPECT_THAT(NamesIn(dir.path()), SizeIs(1));
  }
  EXPECT_THAT(NamesIn(dir.path()), SizeIs(0));
}

TEST(CheckpointWriterTest, TensorsAreSpreadOverShardsWithAnIndex) {
  const TempDir dir;
  CheckpointWriterOptions options;
  options.max_shard_bytes = 10;
  auto writer = CheckpointWriter::Create(dir.File("out"), options);
  FQ_ASSERT_OK(writer);
  for (const char* name : {"a", "b", "c"}) {
    FQ_ASSERT_OK((*writer)->AddTensor(name, DType::kU8, {4}, kBytes));
  }
  FQ_ASSERT_OK((*writer)->AddTensor("large", DType::kU8, {16}, std::vector<uint8_t>(16)));
  FQ_ASSERT_OK((*writer)->AddTensor("d", DType::kU8, {4}, kBytes));
  EXPECT_EQ((*writer)->tensor_bytes(), 32);
  FQ_ASSERT_OK((*writer)->Finish(nlohmann::json::object()));

  EXPECT_THAT(NamesIn(dir.File("out")),
              testing::UnorderedElementsAre(
                  "config.json", "model.safetensors.index.json", "model-00001-of-00004.safetensors",
                  "model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors",
                  "model-00004-of-00004.safetensors"));
  const auto index = nlohmann::json::parse(ReadAll(dir.File("out/model.safetensors.index.json")));
  EXPECT_EQ(index["metadata"]["total_size"], 32);
  EXPECT_EQ(index["weight_map"]["b"], "model-00001-of-00004.safetensors");
  EXPECT_EQ(index["weight_map"]["c"], "model-00002-of-00004.safetensors");
  const auto checkpoint = OpenCheckpoint(dir.File("out"));
  FQ_ASSERT_OK(checkpoint);
  EXPECT_THAT(checkpoint->tensors->tensors(), SizeIs(5));
  for (const TensorInfo& tensor : checkpoint->tensors->tensors()) {
    EXPECT_TRUE(checkpoint->tensors->StoredChecksum(tensor).has_value());
    FQ_EXPECT_OK(checkpoint->tensors->VerifyChecksum(tensor));
  }
}

TEST(CheckpointWriterTest, OutputMustNotExistUnlessEmpty) {
  const TempDir dir;
  dir.Write("full/x", "1");
  dir.Write("file", "1");
  std::filesystem::create_directory(dir.File("empty"));
  for (const char* name : {"full", "file"}) {
    EXPECT_THAT(CheckpointWriter::Create(dir.File(name)),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("output: exists")));
  }
  auto writer = CheckpointWriter::Create(dir.File("empty"));
  FQ_ASSERT_OK(writer);
  FQ_ASSERT_OK((*writer)->AddTensor("a", DType::kU8, {4}, kBytes));
  FQ_EXPECT_OK((*writer)->Finish(nlohmann::json::object()));
  FQ_EXPECT_OK(OpenCheckpoint(dir.File("empty")));
}

TEST(CheckpointWriterTest, KilledRunLeavesNothingThatLoadsAndIsCleanedUp) {
  const TempDir dir;
  const pid_t child = ::fork();
  if (child == 0) {
    auto writer = CheckpointWriter::Create(dir.File("out"));
    if (writer.ok()) (void)(*writer)->AddTensor("a", DType::kU8, {4}, kBytes);
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_THAT(NamesIn(dir.path()), SizeIs(1));
  EXPECT_FALSE(OpenCheckpoint(dir.path() + "/" + NamesIn(dir.path())[0]).ok());
  dir.Write("out.partial-keep/x", "not ours: no process number");

  auto writer = CheckpointWriter::Create(dir.File("out"));
  FQ_ASSERT_OK(writer);
  FQ_ASSERT_OK((*writer)->AddTensor("a", DType::kU8, {4}, kBytes));
  FQ_ASSERT_OK((*writer)->Finish(nlohmann::json::object()));
  EXPECT_THAT(NamesIn(dir.path()), testing::UnorderedElementsAre("out", "out.partial-keep"));
}

TEST(CheckpointWriterTest, PartialFolderOfARunningWriterIsLeftAlone) {
  const TempDir dir;
  std::filesystem::permissions(dir.path(), std::filesystem::perms::all);
  auto writer = CheckpointWriter::Create(dir.File("out"));
  FQ_ASSERT_OK(writer);
  EXPECT_EQ(CodeAsNobody([&] { return CheckpointWriter::Create(dir.File("out")).status(); }),
            absl::StatusCode::kOk);
  FQ_ASSERT_OK((*writer)->AddTensor("a", DType::kU8, {4}, kBytes));
  FQ_EXPECT_OK((*writer)->Finish(nlohmann::json::object()));
}

TEST(CheckpointWriterTest, UnwritableAndMissingParentAreRefusedAtOnce) {
  const TempDir dir;
  std::filesystem::create_directory(dir.File("locked"));
  std::filesystem::permissions(dir.path(), std::filesystem::perms::all);
  EXPECT_EQ(CodeAsNobody([&] { return CheckpointWriter::Create(dir.File("locked/out")).status(); }),
            absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(CheckpointWriter::Create(dir.File("none/out")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("create folder")));
  EXPECT_THAT(CheckpointWriter::Create(""),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("empty path")));
}

// A full disk, by a limit on the size of files in a child process (the same path in the code).
TEST(CheckpointWriterTest, FullDiskIsResourceExhaustedAndLeavesNothing) {
  const TempDir dir;
  std::filesystem::permissions(dir.path(), std::filesystem::perms::all);
  const auto code = CodeAsNobody([&]() -> absl::Status {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return absl::InternalError("setrlimit");
    auto writer = CheckpointWriter::Create(dir.File("out"));
    if (!writer.ok()) return writer.status();
    return (*writer)->AddTensor("a", DType::kU8, {2 << 20}, std::vector<uint8_t>(2 << 20));
  });
  EXPECT_EQ(code, absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(NamesIn(dir.path()), SizeIs(0));
}

TEST(CheckpointWriterTest, MistakesOfTheCallerAreErrorsNotFiles) {
  const TempDir dir;
  auto writer = CheckpointWriter::Create(dir.File("out"));
  FQ_ASSERT_OK(writer);
  EXPECT_FALSE((*writer)->AppendBytes(kBytes).ok());
  EXPECT_FALSE((*writer)->Finish(nlohmann::json::object()).ok());
  FQ_ASSERT_OK((*writer)->AddTensor("a", DType::kU8, {4}, kBytes));
  EXPECT_FALSE((*writer)->AddTensor("a", DType::kU8, {4}, kBytes).ok());
  EXPECT_FALSE((*writer)->AddTensor("b", DType::kU8, {0}, {}).ok());
  EXPECT_FALSE((*writer)->WriteTextFile("sub/x", "1").ok());
  FQ_EXPECT_OK((*writer)->WriteTextFile("x", "1"));
  EXPECT_FALSE((*writer)->WriteTextFile("x", "1").ok());
}

TEST(CheckpointWriterTest, Int8TableHasItsScalesBesideIt) {
  const TempDir dir;
  auto writer = CheckpointWriter::Create(dir.File("out"));
  FQ_ASSERT_OK(writer);
  const std::vector<int8_t> codes = {1, -2, 3, -4, 5, -6};
  const std::vector<BFloat16> scales = {ToBFloat16(0.5f), ToBFloat16(0.25f)};
  FQ_ASSERT_OK(WriteInt8Table(writer->get(), "embed.weight", 2, 3, codes, scales));
  FQ_ASSERT_OK((*writer)->Finish(nlohmann::json::object()));
  const auto checkpoint = OpenCheckpoint(dir.File("out"));
  FQ_ASSERT_OK(checkpoint);
  const TensorInfo* const table = checkpoint->tensors->Find("embed.weight");
  const TensorInfo* const table_scale = checkpoint->tensors->Find("embed.weight_scale");
  ASSERT_NE(table, nullptr);
  ASSERT_NE(table_scale, nullptr);
  EXPECT_EQ(table->dtype, DType::kI8);
  EXPECT_EQ(table->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(table_scale->dtype, DType::kBF16);
  EXPECT_EQ(table_scale->shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ((*checkpoint->tensors->ReadBytes("embed.weight"))[1], 0xfe);
  EXPECT_TRUE(IsCheckedAtLoad(table_scale->name));
}

}  // namespace
}  // namespace flashquant
