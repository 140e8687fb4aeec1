// A step's plan as flat arrays, read back from the CPU backend's memory.
#include "engine/model/batch_input.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "kernels/backend_factory.h"

namespace flashquant {
namespace {

using testing::ElementsAre;

class BatchInputTest : public testing::Test {
 protected:
  void SetUp() override {
    auto backend = CreateBackend({.kind = "cpu", .num_threads = 1});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    auto input = BatchInput::Create(
        backend_.get(), {.max_rows = 16, .max_sequences = 4, .max_blocks = 16, .block_tokens = 4});
    ASSERT_TRUE(input.ok()) << input.status();
    input_ = *std::move(input);
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<BatchInput> input_;
};

TEST_F(BatchInputTest, LaysSequencesOutOneAfterTheOtherAndPadsTheRows) {
  const std::vector<int32_t> prefill = {10, 11, 12};
  const std::vector<int32_t> prefill_blocks = {3, 5};
  const std::vector<int32_t> decode = {20};
  const std::vector<int32_t> decode_blocks = {7, 8, 9};
  StepPlan plan;
  plan.sequences = {
      {.id = 1, .first_position = 2, .token_ids = prefill, .block_ids = prefill_blocks},
      {.id = 2,
       .first_position = 8,
       .token_ids = decode,
       .block_ids = decode_blocks,
       .samples = true,
       .previous_row = 0}};
  plan.num_tokens = 4;
  plan.num_rows = 8;
  ASSERT_TRUE(input_->Load(plan).ok());

  EXPECT_EQ(input_->num_rows(), 8);
  EXPECT_THAT(std::span(input_->token_ids(), 8), ElementsAre(10, 11, 12, 20, 0, 0, 0, 0));
  EXPECT_THAT(std::span(input_->previous_rows(), 8), ElementsAre(-1, -1, -1, 0, -1, -1, -1, -1));
  EXPECT_THAT(std::span(input_->positions(), 8), ElementsAre(2, 3, 4, 8, 0, 0, 0, 0));
  // Slot = block * 4 + offset; padding rows write nowhere.
  EXPECT_THAT(std::span(input_->slots(), 8), ElementsAre(14, 15, 20, 36, -1, -1, -1, -1));
  ASSERT_EQ(input_->num_logit_rows(), 1);
  EXPECT_EQ(input_->logit_rows()[0], 3);

  const AttentionBatch attention = input_->attention();
  EXPECT_EQ(attention.num_sequences, 2);
  EXPECT_EQ(attention.num_tokens, 4);
  EXPECT_THAT(std::span(attention.query_indptr, 3), ElementsAre(0, 3, 4));
  EXPECT_THAT(std::span(attention.context_lengths, 2), ElementsAre(5, 9));
  EXPECT_THAT(std::span(attention.block_indptr, 3), ElementsAre(0, 2, 5));
  EXPECT_THAT(std::span(attention.block_ids, 5), ElementsAre(3, 5, 7, 8, 9));
}

TEST_F(BatchInputTest, NothingOfTheStepBeforeIsLeft) {
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  const std::vector<int32_t> blocks = {1};
  StepPlan plan;
  plan.sequences = {{.id = 1, .token_ids = tokens, .block_ids = blocks, .samples = true}};
  plan.num_tokens = plan.num_rows = 4;
  ASSERT_TRUE(input_->Load(plan).ok());
  plan.sequences[0].token_ids = std::span(tokens).first(1);
  plan.sequences[0].samples = false;
  plan.num_tokens = plan.num_rows = 1;
  ASSERT_TRUE(input_->Load(plan).ok());
  EXPECT_EQ(input_->num_rows(), 1);
  EXPECT_EQ(input_->num_logit_rows(), 0);
  EXPECT_EQ(input_->attention().num_sequences, 1);
  EXPECT_THAT(std::span(input_->attention().query_indptr, 2), ElementsAre(0, 1));
}

}  // namespace
}  // namespace flashquant
