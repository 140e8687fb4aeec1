// Opening and reading of untrusted files.
#include "engine/checkpoint/file_reader.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>

#include "tests/engine/checkpoint/test_files.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

TEST(FileReaderTest, ReadsBytesInsideTheFile) {
  const TempDir dir;
  const auto reader = FileReader::Open(dir.Write("a", "0123456789"));
  FQ_ASSERT_OK(reader);
  EXPECT_EQ((*reader)->num_bytes(), 10);
  std::array<char, 3> bytes = {};
  FQ_EXPECT_OK((*reader)->ReadAt(4, 3, bytes.data()));
  EXPECT_EQ(std::string(bytes.data(), 3), "456");
  FQ_EXPECT_OK((*reader)->ReadAt(10, 0, bytes.data()));
}

TEST(FileReaderTest, RefusesARangeOutsideTheFile) {
  const TempDir dir;
  const auto reader = FileReader::Open(dir.Write("a", "0123456789"));
  FQ_ASSERT_OK(reader);
  std::array<char, 16> bytes = {};
  for (const auto& [offset, num_bytes] : std::initializer_list<std::pair<int64_t, int64_t>>{
           {8, 3}, {11, 0}, {-1, 1}, {0, -1}, {1, INT64_MAX}, {INT64_MAX, 1}}) {
    EXPECT_THAT((*reader)->ReadAt(offset, num_bytes, bytes.data()),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("truncated")));
  }
}

// M1
TEST(FileReaderTest, MissingFileIsNotFound) {
  const TempDir dir;
  EXPECT_THAT(FileReader::Open(dir.File("none")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(dir.File("none"))));
}

// M1
TEST(FileReaderTest, FolderDeviceAndFifoAreRefusedWithoutHanging) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo(dir.File("fifo").c_str(), 0600), 0);
  for (const std::string& path : {dir.path(), dir.File("fifo"), std::string("/dev/zero")}) {
    EXPECT_THAT(FileReader::Open(path),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("not a regular file")));
  }
}

// M1
TEST(FileReaderTest, UnreadableFileIsPermissionDenied) {
  const TempDir dir;
  const std::string path = dir.Write("secret", "x");
  std::filesystem::permissions(dir.path(), std::filesystem::perms::all);
  std::filesystem::permissions(path, std::filesystem::perms::none);
  EXPECT_EQ(CodeAsNobody([&] { return FileReader::Open(path).status(); }),
            absl::StatusCode::kPermissionDenied);
}

// M22
TEST(FileReaderTest, FileThatShrinksOrGrowsWhileOpenIsDetected) {
  const TempDir dir;
  const std::string path = dir.Write("a", "0123456789");
  const auto reader = FileReader::Open(path);
  FQ_ASSERT_OK(reader);
  char byte = 0;
  std::filesystem::resize_file(path, 4);
  EXPECT_THAT((*reader)->ReadAt(8, 1, &byte),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("changed while being read")));
  std::filesystem::resize_file(path, 20);
  EXPECT_THAT((*reader)->ReadAt(0, 1, &byte),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("changed while being read")));
}

TEST(FileReaderTest, ReadFileKeepsItsLimit) {
  const TempDir dir;
  const std::string path = dir.Write("a", "0123456789");
  const auto text = ReadFile(path, 10);
  FQ_ASSERT_OK(text);
  EXPECT_EQ(*text, "0123456789");
  EXPECT_THAT(ReadFile(path, 9),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("limit 9 bytes, got 10")));
}

TEST(FileReaderTest, NamesInMessagesAreOneLineOfPlainText) {
  EXPECT_EQ(PrintableName("model.layers.0"), "model.layers.0");
  EXPECT_EQ(PrintableName(std::string_view("a\n\0\x1b[31m\xc3\xa9", 10)), "a???[31m??");
  EXPECT_EQ(PrintableName(std::string(100, 'a')), std::string(64, 'a') + "...");
}

}  // namespace
}  // namespace flashquant
