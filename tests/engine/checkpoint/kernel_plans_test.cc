// Tests of the file of kernel plans: what is written is read again, and everything that a hostile
// file may hold is refused by name.
#include "engine/checkpoint/kernel_plans.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

class KernelPlansTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        testing::TempDir() + "/fq_" + testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& text) {
    std::ofstream(folder_ + "/kernel_plans.json", std::ios::binary) << text;
  }
  std::string folder_;
};

TEST_F(KernelPlansTest, WhatIsWrittenIsReadAgain) {
  const std::vector<TunedPlan> plans = {{132, 4096, 6144, 1, 4, true, 12},
                                        {170, 896, 4864, 4, 1, false, 9}};
  Write(KernelPlansJson(plans));
  const auto found = ReadModelKernelPlans(folder_);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*found)[i].num_sms, plans[i].num_sms);
    EXPECT_EQ((*found)[i].k, plans[i].k);
    EXPECT_EQ((*found)[i].n, plans[i].n);
    EXPECT_EQ((*found)[i].batch_blocks, plans[i].batch_blocks);
    EXPECT_EQ((*found)[i].num_ranks, plans[i].num_ranks);
    EXPECT_EQ((*found)[i].cluster_join, plans[i].cluster_join);
    EXPECT_EQ((*found)[i].num_warps, plans[i].num_warps);
  }
}

TEST_F(KernelPlansTest, AFolderWithoutTheFileHasNone) {
  const auto found = ReadModelKernelPlans(folder_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(found->empty());
}

TEST_F(KernelPlansTest, ImpossiblePlansAreRefusedByName) {
  const auto plan = [](const std::string& key, const std::string& value) {
    std::string text = "{\"format_version\": 1, \"plans\": [{";
    for (const auto& [name, good] :
         std::vector<std::pair<std::string, std::string>>{{"num_sms", "132"},
                                                          {"k", "64"},
                                                          {"n", "64"},
                                                          {"rows", "8"},
                                                          {"ranks", "2"},
                                                          {"cluster", "true"},
                                                          {"warps", "12"}}) {
      text += (name == "num_sms" ? "\"" : ", \"") + name + "\": " + (name == key ? value : good);
    }
    return text + "}]}";
  };
  Write(plan("", ""));
  EXPECT_TRUE(ReadModelKernelPlans(folder_).ok());
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, std::string>>{{"num_sms", "0"},
                                                        {"k", "4294967296"},
                                                        {"n", "-8"},
                                                        {"rows", "24"},
                                                        {"ranks", "65"},
                                                        {"ranks", "0"},
                                                        {"cluster", "1"},
                                                        {"warps", "33"},
                                                        {"warps", "null"},
                                                        {"warps", "1.5"}}) {
    Write(plan(key, value));
    EXPECT_THAT(ReadModelKernelPlans(folder_).status(),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(key)))
        << value;
  }
  for (const std::string text :
       {"", "[]", "{\"format_version\": 2, \"plans\": []}", "{\"format_version\": 1}",
        "{\"format_version\": 1, \"plans\": 3}", "{\"format_version\": 1, \"plans\": [3]}"}) {
    Write(text);
    EXPECT_FALSE(ReadModelKernelPlans(folder_).ok()) << text;
  }
}

}  // namespace
}  // namespace flashquant
