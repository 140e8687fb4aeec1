// Correctness of the fused kernel for many rows on a GPU, against products in FP64 of the exact
// matrix (linear_case.cuh). Stand-alone program: exit code 0 when all checks hold, or where the
// device has no such kernel. `--quick` runs few, small cases (for compute-sanitizer).
#include <cstdio>
#include <cstring>
#include <string>

#include "kernels/cuda/linear_w4a16/many_rows_plan.h"
#include "tests/gpu/linear_case.cuh"

namespace flashquant::gpu_test {

using namespace bench;

namespace {

constexpr int kMaxM = 257;

cudaError_t Launch(const cuda::LinearW4A16Params& params) {
  return cuda::LaunchLinearManyRows(params, nullptr);
}

DeviceScratch Scratch(const LinearCase& c, int m) {
  return DeviceScratch(cuda::LinearManyRowsWorkspaceBytes(m, ThisDevice().num_sms),
                       cuda::LinearManyRowsCounters(c.layout(), m));
}

cuda::LinearW4A16Params Params(LinearCase& c, const DeviceScratch& scratch, int m) {
  cuda::LinearW4A16Params params = c.Params(scratch, m);
  params.programmatic_launch = true;
  return params;
}

void Verify(LinearCase& c, std::initializer_list<int> ms) {
  for (const int m : ms) {
    DeviceScratch scratch = Scratch(c, m);
    c.Verify(Params(c, scratch, m), scratch, "", Launch);
  }
}

void CheckShapes(bool quick) {
  const int shapes[][2] = {{576, 576},   {896, 1152}, {1536, 576},  {2560, 896},  {896, 4864},
                           {3584, 1536}, {896, 896},  {18944, 896}, {896, 18944}, {128, 64},
                           {64, 8},      {8, 8},      {136, 72},    {200, 200}};
  for (const auto& shape : shapes) {
    if (quick && (shape[0] > 600 || shape[1] > 600)) continue;
    ProblemSpec spec;
    spec.k = shape[0];
    spec.n = shape[1];
    spec.group_size = spec.k % 128 == 0 ? 128 : -1;
    spec.density = 0.02;
    spec.layout = OutlierLayout::kRaggedRecords;
    LinearCase c(spec, kMaxM);
    if (quick) {
      Verify(c, {17, 64, 96, 100});
    } else {
      Verify(c, {1, 7, 8, 9, 16, 31, 32, 33, 64, 65, 96, 100, 128, 129, 200, 256, 257});
    }
  }
}

void CheckGroupsAndDensities(bool quick) {
  for (const int group : {32, 64, 128, -1}) {
    for (const bool zeros : {false, true}) {
      for (const double density : {0.0, 0.01, 0.03, 0.1}) {
        if (quick && density == 0.01) continue;
        ProblemSpec spec;
        spec.k = quick ? 384 : 1536;
        spec.n = quick ? 136 : 4864;
        spec.group_size = group;
        spec.zero_points = zeros;
        spec.density = density;
        spec.seed = static_cast<uint64_t>(group + 2) * 10 + static_cast<uint64_t>(zeros);
        LinearCase c(spec, kMaxM);
        if (quick) {
          Verify(c, {40, 144});
        } else {
          Verify(c, {1, 8, 16, 31, 32, 33, 64, 65, 128, 144, 200, 256});
        }
      }
    }
  }
}

void CheckLayouts() {
  for (const OutlierLayout layout : {OutlierLayout::kEmptyTiles, OutlierLayout::kHotColumn,
                                     OutlierLayout::kHotTile, OutlierLayout::kRaggedRecords}) {
    for (const int tile_n : {64, 128, 256}) {
      ProblemSpec spec;
      spec.k = 2056;
      spec.n = 712;
      spec.group_size = -1;
      spec.density = 0.02;
      spec.layout = layout;
      spec.tile_n = tile_n;
      spec.tile_k = tile_n == 128 ? 256 : 64;
      LinearCase c(spec, kMaxM);
      Verify(c, {17, 33, 70, 100, 140});
    }
  }
}

// Rows that were not in any cache come later than weights that were: the order in which the rings
// fill changes from launch to launch.
void CheckRaces() {
  for (const double density : {0.0, 0.02}) {
    ProblemSpec spec;
    spec.k = 896;
    spec.n = 4864;
    spec.group_size = 64;
    spec.density = density;
    LinearCase c(spec, kMaxM);
    for (int i = 0; i < 100; ++i) Verify(c, {32, 20, 64, 40, 96, 144, 128, 228});
  }
}

void CheckRepeatsAndRows() {
  ProblemSpec spec;
  spec.k = 4096;
  spec.n = 4096;
  spec.density = 0.03;
  LinearCase c(spec, kMaxM);
  for (const int m : {24, 64, 144, 200}) {
    const DeviceScratch scratch = Scratch(c, m);
    CheckRepeats(c, Params(c, scratch, m), 1000, Launch);
    CheckRowIndependence(c, Params(c, scratch, m), Launch);
  }
}

void CheckRefusals() {
  ProblemSpec spec;
  spec.k = 4096;
  spec.n = 64;
  LinearCase c(spec, 64);
  const DeviceScratch scratch = Scratch(c, 64);
  auto refused = [&](auto&& change, const char* what) {
    cuda::LinearW4A16Params p = Params(c, scratch, 64);
    change(p);
    Check(Launch(p) == cudaErrorInvalidValue, std::string("accepted ") + what);
  };
  using Params = cuda::LinearW4A16Params;
  refused([](Params& p) { p.m = 0; }, "m 0");
  refused([](Params& p) { p.layout.k = 4097; }, "k not a multiple of 8");
  refused([](Params& p) { p.x_stride = 8; }, "a short x stride");
  refused([](Params& p) { p.x = static_cast<const char*>(p.x) + 2; }, "a misaligned x");
  refused([](Params& p) { p.y = nullptr; }, "no y");
  refused([](Params& p) { p.layout.groups_per_chunk = 3; }, "3 groups in a chunk");
  (void)cudaGetLastError();
}

int Main(bool quick) {
  if (!cuda::HasLinearManyRows()) {
    std::printf("linear_many_rows: this device or build has no such kernel\n");
    return 0;
  }
  CheckShapes(quick);
  CheckGroupsAndDensities(quick);
  if (!quick) {
    CheckLayouts();
    CheckRaces();
    CheckRepeatsAndRows();
    CheckRefusals();
  }
  FQ_CUDA_OK(cudaDeviceSynchronize());
  std::printf("linear_many_rows correctness: %d checks, %d failed, worst relative error %.2e\n",
              num_checks, num_failures, worst_error);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flashquant::gpu_test

int main(int argc, char** argv) {
  return flashquant::gpu_test::Main(argc > 1 && std::strcmp(argv[1], "--quick") == 0);
}
