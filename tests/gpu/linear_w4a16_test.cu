// Correctness of the fused linear kernel on a GPU, against products in FP64 of the exact matrix
// (linear_case.cuh).
// Stand-alone program: exit code 0 when all checks hold. `--quick` runs few, small cases (for
// compute-sanitizer).
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/cuda/linear_w4a16/shared_layout.h"
#include "tests/gpu/linear_case.cuh"

namespace flashquant::gpu_test {

using namespace bench;

namespace {

cudaError_t Launch(const cuda::LinearW4A16Params& params) {
  return cuda::LaunchLinearW4A16(params, nullptr);
}

struct RunOptions {
  cuda::CopyPath path = cuda::CopyPath::kAuto;
  bool programmatic = false;
  int shared_limit = 0;
  int rows_per_pass = 32;
};

// A plan and what its launches need.
struct Planned {
  Planned(const cuda::PackedLayout& layout, const cuda::LinearPlan& p, int max_m)
      : plan(p), scratch(layout, p, max_m) {}

  cuda::LinearPlan plan;
  DeviceScratch scratch;
};

// A problem for up to 64 rows.
class Case : public LinearCase {
 public:
  static constexpr int kMaxM = 64;

  explicit Case(const ProblemSpec& spec) : LinearCase(spec, kMaxM) {}

  cuda::LinearW4A16Params Params(const Planned& planned, int m, const RunOptions& options) {
    cuda::LinearW4A16Params p = LinearCase::Params(planned.scratch, m);
    p.plan = planned.plan;
    p.path = options.path;
    p.programmatic_launch = options.programmatic;
    p.shared_bytes_limit = options.shared_limit;
    p.rows_per_pass = options.rows_per_pass;
    return p;
  }
  void Verify(Planned& plan, int m, const RunOptions& options, const std::string& what) {
    LinearCase::Verify(Params(plan, m, options), plan.scratch, what, Launch);
  }
};

// The planner's choice for `m` rows on this device, or on one with `shared_kb` and no clusters.
Planned Choose(const Case& c, int m, int shared_kb = 0) {
  cuda::DeviceShape device = ThisDevice();
  if (shared_kb != 0) {
    device.shared_bytes = shared_kb * 1024;
    device.max_clusters = {};
  }
  const cuda::LinearPlan plan = cuda::ChooseLinearPlan(c.layout(), m, device);
  Check(plan.num_splits > 0, c.spec().Name() + ": no plan for m " + std::to_string(m));
  return Planned(c.layout(), plan, Case::kMaxM);
}

// Both copy paths, each with its own planner's choice.
void CheckBothPaths(Case& c, int m, const std::string& what) {
  Planned bulk = Choose(c, std::min(m, 32));
  c.Verify(bulk, m, {cuda::CopyPath::kAuto, true, 0, 32}, what + " bulk");
  Planned small = Choose(c, std::min(m, 16), 99);
  c.Verify(small, m, {cuda::CopyPath::kCpAsync, false, 99 * 1024, 16}, what + " cp.async 99 KB");
  Planned large = Choose(c, std::min(m, 32), 160);
  c.Verify(large, m, {cuda::CopyPath::kCpAsync, false, 160 * 1024, 32}, what + " cp.async 160 KB");
}

void CheckShapes() {
  const int shapes[][2] = {{576, 576},  {896, 1152},  {1536, 576},  {2560, 896}, {3584, 1536},
                           {896, 4864}, {18944, 896}, {896, 18944}, {128, 64},   {64, 8},
                           {8, 8},      {136, 72},    {200, 200}};
  for (const auto& shape : shapes) {
    ProblemSpec spec;
    spec.k = shape[0];
    spec.n = shape[1];
    spec.group_size = spec.k % 128 == 0 ? 128 : -1;
    spec.density = 0.02;
    spec.layout = OutlierLayout::kRaggedRecords;
    Case c(spec);
    for (int m : {1, 7, 8, 9, 16, 17, 31, 32, 33, 64}) CheckBothPaths(c, m, "shapes");
  }
}

void CheckGroupsAndDensities() {
  for (int group : {32, 64, 128, -1}) {
    for (bool zeros : {false, true}) {
      for (double density : {0.0, 0.01, 0.03, 0.1}) {
        ProblemSpec spec;
        spec.k = 1536;
        spec.n = 896;
        spec.group_size = group;
        spec.zero_points = zeros;
        spec.density = density;
        spec.seed = static_cast<uint64_t>(group + 2) * 10 + static_cast<uint64_t>(zeros);
        Case c(spec);
        for (int m : {1, 7, 8, 9, 16, 31, 32, 64}) CheckBothPaths(c, m, "groups");
      }
    }
  }
}

void CheckLayouts(bool quick) {
  for (OutlierLayout layout : {OutlierLayout::kEmptyTiles, OutlierLayout::kHotColumn,
                               OutlierLayout::kHotTile, OutlierLayout::kRaggedRecords}) {
    for (int tile_n : {64, 128, 256}) {
      if (quick && tile_n != 128) continue;
      ProblemSpec spec;
      spec.k = quick ? 392 : 2056;
      spec.n = quick ? 136 : 712;
      spec.group_size = -1;
      spec.density = 0.02;
      spec.layout = layout;
      spec.tile_n = tile_n;
      spec.tile_k = tile_n == 128 ? 256 : 64;
      Case c(spec);
      for (int m : {3, 8, 13, 32}) CheckBothPaths(c, m, "layouts");
    }
  }
}

bool FitsDevice(const Case& c, const cuda::LinearPlan& plan, int m) {
  const int64_t ring = int64_t{plan.num_warps} * cuda::StageBytes(c.layout());
  return plan.num_warps <= cuda::kMaxWarpsPerBlock &&
         cuda::PlanFixedSharedBytes(c.layout(), plan, m) + ring <= ThisDevice().shared_bytes;
}

// Any legal plan gives the right sums: cuts inside strips, idle warps, uneven parts.
void CheckPlans(bool quick) {
  ProblemSpec spec;
  spec.k = quick ? 1160 : 3584;
  spec.n = quick ? 200 : 1536;
  spec.density = 0.03;
  spec.group_size = quick ? -1 : 128;
  Case c(spec);
  for (int ranks : {1, 2, 3, 4, 5, 8, 14}) {
    for (int splits : {1, 3, 7, 26, 48}) {
      for (int warps : {1, 5, 8, 11, 12}) {
        for (bool cluster : {false, true}) {
          if (ranks > c.layout().num_units || splits > c.layout().num_strips) continue;
          if (cluster && (ranks == 1 || ranks > 8)) continue;
          if (quick && warps % 2 == 0) continue;
          cuda::LinearPlan plan;
          plan.num_ranks = ranks;
          plan.num_splits = splits;
          plan.num_warps = warps;
          plan.cluster_join = cluster;
          Planned planned(c.layout(), plan, Case::kMaxM);
          for (int m : {8, 16, 32}) {
            if (!FitsDevice(c, plan, m)) continue;
            const std::string what = "ranks " + std::to_string(ranks) + " splits " +
                                     std::to_string(splits) + " warps " + std::to_string(warps) +
                                     (cluster ? " cluster" : "");
            c.Verify(planned, m, {cuda::CopyPath::kAuto, true, 0, 32}, what);
            if (!cluster) c.Verify(planned, m, {cuda::CopyPath::kCpAsync, false, 0, 32}, what);
          }
        }
      }
    }
  }
}

// Records of several pieces, in runs much longer than a ring: what is copied again and again to one
// place, between the two copies of a refill.
void CheckLongRecords() {
  ProblemSpec spec;
  spec.k = 2056;
  spec.n = 392;
  spec.group_size = -1;
  spec.density = 0.02;
  spec.layout = OutlierLayout::kHotTile;
  spec.tile_n = 128;
  spec.tile_k = 256;
  Case c(spec);
  cuda::LinearPlan plan;
  plan.num_ranks = 1;
  plan.num_splits = 1;
  for (int warps : {1, 4}) {
    plan.num_warps = warps;
    Planned planned(c.layout(), plan, Case::kMaxM);
    for (int m : {8, 16, 32}) {
      if (!FitsDevice(c, plan, m)) continue;
      const std::string what = "long records, warps " + std::to_string(warps);
      c.Verify(planned, m, {cuda::CopyPath::kAuto, true, 0, 32}, what);
      c.Verify(planned, m, {cuda::CopyPath::kCpAsync, false, 0, 32}, what);
    }
  }
}

void CheckRepeats(int repeats, bool clusters) {
  for (int m : {8, 16, 32}) {
    ProblemSpec spec;
    spec.k = 4096;
    spec.n = 4096;
    spec.density = 0.03;
    Case c(spec);
    Planned plan = Choose(c, m, clusters ? 0 : 227);
    gpu_test::CheckRepeats(c, c.Params(plan, m, {cuda::CopyPath::kAuto, true, 0, 32}), repeats,
                           Launch);
  }
}

void CheckRowIndependence() {
  ProblemSpec spec;
  spec.k = 2560;
  spec.n = 896;
  spec.density = 0.02;
  Case c(spec);
  for (int m : {8, 16, 32}) {
    Planned plan = Choose(c, m);
    c.Verify(plan, m, {cuda::CopyPath::kAuto, false, 0, 32}, "rows");
    gpu_test::CheckRowIndependence(c, c.Params(plan, m, {}), Launch);
  }
}

// BF16 bits times 2^exponent; a zero stays one.
uint16_t Scaled(uint16_t bits, int exponent) {
  return (bits & 0x7fff) == 0 ? bits : static_cast<uint16_t>(bits + exponent * 128);
}

// x times a power of two gives y times it, bit for bit: no step leaves the range of its numbers.
void CheckScaledFeatures(bool zero_points) {
  ProblemSpec spec;
  spec.k = 512;
  spec.n = 64;
  spec.zero_points = zero_points;
  spec.density = 0.02;
  Case c(spec);
  const std::vector<uint16_t> x = c.x().ToHost();
  const auto product = [&](const std::vector<uint16_t>& of, const Planned& plan, int m) {
    FQ_CUDA_OK(cudaMemcpy(c.x().get(), of.data(), c.x().bytes(), cudaMemcpyHostToDevice));
    FQ_CUDA_OK(Launch(c.Params(plan, m, {})));
    return c.y().ToHost();
  };
  for (int m : {1, 16, 32}) {
    Planned plan = Choose(c, m);
    const std::vector<uint16_t> y = product(x, plan, m);
    for (int exponent : {-20, 40}) {
      std::vector<uint16_t> scaled = x;
      for (int row = 0; row < m; ++row) {
        for (int k = 0; k < spec.k; ++k) {
          uint16_t& value = scaled[static_cast<size_t>(row * c.x_stride() + k)];
          value = Scaled(value, exponent);
        }
      }
      const std::vector<uint16_t> found = product(scaled, plan, m);
      bool same = true;
      for (int row = 0; row < m; ++row) {
        for (int n = 0; n < spec.n; ++n) {
          const auto at = static_cast<size_t>(row * c.y_stride() + n);
          same = same && found[at] == Scaled(y[at], exponent);
        }
      }
      Check(same, "x times 2^" + std::to_string(exponent) + " at m " + std::to_string(m));
    }
  }
}

// Features so small that they count as zeros are no trouble beside others.
void CheckTinyFeatures() {
  ProblemSpec spec;
  spec.k = 256;
  spec.n = 64;
  spec.zero_points = true;
  Case c(spec);
  std::vector<uint16_t> x = c.x().ToHost();
  for (int k = 0; k < 128; ++k) x[static_cast<size_t>(k)] = ToBf16(k % 2 == 0 ? 0.0f : 1e-36f);
  FQ_CUDA_OK(cudaMemcpy(c.x().get(), x.data(), c.x().bytes(), cudaMemcpyHostToDevice));
  for (int m : {1, 16}) {
    Planned plan = Choose(c, m);
    FQ_CUDA_OK(Launch(c.Params(plan, m, {})));
    const std::vector<uint16_t> y = c.y().ToHost();
    bool finite = true;
    for (int n = 0; n < spec.n; ++n) {
      finite = finite && std::isfinite(FromBf16(y[static_cast<size_t>(n)]));
    }
    Check(finite, "tiny features give no number at m " + std::to_string(m));
  }
}

void CheckRefusals() {
  ProblemSpec spec;
  spec.k = 4096;
  spec.n = 64;
  Case c(spec);
  Planned plan = Choose(c, 8);
  auto refused = [&](auto&& change, cudaError_t want, const char* what) {
    cuda::LinearW4A16Params p = c.Params(plan, 8, {});
    change(p);
    Check(Launch(p) == want, std::string("accepted ") + what);
  };
  using Params = cuda::LinearW4A16Params;
  refused([](Params& p) { p.m = 0; }, cudaErrorInvalidValue, "m 0");
  refused([](Params& p) { p.layout.k = 4097; }, cudaErrorInvalidValue, "k not a multiple of 8");
  refused([](Params& p) { p.x_stride = 8; }, cudaErrorInvalidValue, "a short x stride");
  refused([](Params& p) { p.x = static_cast<const char*>(p.x) + 2; }, cudaErrorInvalidValue,
          "a misaligned x");
  refused([](Params& p) { p.y = nullptr; }, cudaErrorInvalidValue, "no y");
  refused([](Params& p) { p.layout.groups_per_chunk = 3; }, cudaErrorInvalidValue,
          "3 groups in a chunk");
  refused([](Params& p) { p.shared_bytes_limit = 20480; }, cudaErrorInvalidConfiguration,
          "too little shared memory");
  (void)cudaGetLastError();
}

int Main(bool quick) {
  const double start = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
  CheckLayouts(quick);
  CheckPlans(quick);
  CheckLongRecords();
  if (!quick) {
    CheckShapes();
    CheckGroupsAndDensities();
    CheckRepeats(1000, true);
    CheckRepeats(1000, false);
    CheckRowIndependence();
    CheckScaledFeatures(false);
    CheckScaledFeatures(true);
    CheckTinyFeatures();
    CheckRefusals();
  }
  FQ_CUDA_OK(cudaDeviceSynchronize());
  std::printf(
      "linear_w4a16 correctness: %d checks, %d failed, worst relative error %.2e, %.0f CPU s\n",
      num_checks, num_failures, worst_error,
      static_cast<double>(std::clock()) / CLOCKS_PER_SEC - start);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flashquant::gpu_test

int main(int argc, char** argv) {
  return flashquant::gpu_test::Main(argc > 1 && std::strcmp(argv[1], "--quick") == 0);
}
