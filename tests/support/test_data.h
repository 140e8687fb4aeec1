// Where test data lies: what was made for this project in tests/data, the rest (third-party data,
// the BF16 story model) in the folder named by FQ_TEST_DATA, ../shared by default. Tests run in the
// repository root.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace flashquant {

// "tests/data/NAME".
inline std::string TestDataPath(const std::string& name) { return "tests/data/" + name; }

// "FQ_TEST_DATA/NAME", e.g. SharedDataPath("models/story-22m"); the file or folder may be missing.
inline std::string SharedDataPath(const std::string& name) {
  const char* root = std::getenv("FQ_TEST_DATA");
  return std::string(root != nullptr ? root : "../shared") + "/" + name;
}

inline bool HasSharedData(const std::string& name) {
  return std::filesystem::exists(SharedDataPath(name));
}

}  // namespace flashquant

// Skips the running test, by name, when shared data is not there.
#define FQ_SKIP_WITHOUT_SHARED_DATA(name)             \
  if (!::flashquant::HasSharedData(name)) {           \
    GTEST_SKIP() << "needs FQ_TEST_DATA: " << (name); \
  }                                                   \
  static_assert(true, "needs a semicolon")
