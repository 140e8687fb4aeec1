// A layer of several parts as one set of canonical arrays: packing those gives what packing the
// parts and joining them does. "Device" memory is the CPU backend's.
#include "kernels/cuda/backend/canonical_upload.h"

#include <memory>
#include <vector>

#include "kernels/backend_factory.h"
#include "kernels/cuda/backend/join_packed.h"
#include "tests/kernels/cuda/backend/packed_parts.h"
#include "tests/support/random_weights.h"
#include "tests/support/status_matchers.h"

namespace flashquant::cuda {
namespace {

struct Part {
  int64_t n = 0;
  double density = 0.0;
};

class CanonicalUploadTest : public testing::Test {
 protected:
  void SetUp() override {
    auto backend = CreateBackend({.kind = "cpu", .num_threads = 1});
    FQ_ASSERT_OK(backend);
    backend_ = *std::move(backend);
  }
  void Make(const std::vector<Part>& parts, int64_t k, int64_t group_size, bool symmetric) {
    layers_.clear();
    parts_.clear();
    for (const Part& part : parts) {
      RandomLinearOptions options;
      options.n = part.n;
      options.k = k;
      options.group_size = group_size;
      options.symmetric = symmetric;
      options.density = part.density;
      options.seed = layers_.size() + 1;
      layers_.push_back(std::make_unique<RandomLinear>(options));
      parts_.push_back(layers_.back()->part());
    }
  }
  void ExpectSamePacking() {
    ASSERT_TRUE(IsCanonicallyJoinable(parts_));
    const CanonicalLayer sizes = PlaceCanonicalLayer(parts_, nullptr);
    const auto staging = backend_->Allocate(sizes.num_bytes);
    FQ_ASSERT_OK(staging);
    const CanonicalLayer layer = PlaceCanonicalLayer(parts_, staging->As<uint8_t>());
    EXPECT_EQ(layer.num_bytes, sizes.num_bytes);
    FQ_ASSERT_OK(UploadCanonicalLayer(parts_, layer, backend_.get()));
    const PackedLinear at_once = PackLinear(layer.weight, layer.outliers, 1);

    std::vector<PackedLinear> packed;
    for (const LinearPart& part : parts_) packed.push_back(PackPart(part));
    const PackedLinear joined = JoinPacked(packed);
    EXPECT_EQ(at_once.layout.n, joined.layout.n);
    EXPECT_EQ(at_once.layout.max_outlier_bytes, joined.layout.max_outlier_bytes);
    EXPECT_EQ(at_once.layout.num_bytes, joined.layout.num_bytes);
    EXPECT_TRUE(at_once.bytes == joined.bytes);
  }

  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<RandomLinear>> layers_;
  std::vector<LinearPart> parts_;
};

TEST_F(CanonicalUploadTest, PartsThatEndWithATileArePackedAsOneLayer) {
  for (const bool symmetric : {false, true}) {
    for (const int64_t group_size : {32, 128, -1}) {
      Make({{256, 0.02}, {128, 0.01}, {72, 0.03}}, 400, group_size, symmetric);
      ExpectSamePacking();
    }
  }
}

TEST_F(CanonicalUploadTest, PartsWithoutOutliersStandBesideOthers) {
  Make({{128, 0.0}, {128, 0.02}, {128, 0.0}}, 256, 128, true);
  ExpectSamePacking();
  Make({{128, 0.0}, {40, 0.0}}, 256, 128, false);
  ExpectSamePacking();
  Make({{40, 0.02}}, 256, 128, false);
  ExpectSamePacking();
}

TEST_F(CanonicalUploadTest, PartsThatEndInsideATileOrDifferInFormAreNotJoined) {
  Make({{96, 0.02}, {128, 0.02}}, 256, 128, true);
  EXPECT_FALSE(IsCanonicallyJoinable(parts_));
  Make({{128, 0.02}}, 256, 128, true);
  const std::vector<LinearPart> one = parts_;
  const auto kept = std::move(layers_);
  Make({{128, 0.02}}, 256, 64, true);
  EXPECT_FALSE(IsCanonicallyJoinable(std::vector<LinearPart>{one[0], parts_[0]}));
  const auto kept_too = std::move(layers_);
  Make({{128, 0.02}}, 256, 128, false);
  EXPECT_FALSE(IsCanonicallyJoinable(std::vector<LinearPart>{one[0], parts_[0]}));
}

}  // namespace
}  // namespace flashquant::cuda
