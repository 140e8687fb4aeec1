// See cublas_baseline.h.
#include "kernels/bench/cublas_baseline.h"

#include <dlfcn.h>

#include <vector>

#if __has_include(<cublasLt.h>) && __has_include(<cublas_v2.h>)
#include <cublasLt.h>
#include <cublas_v2.h>
#define FQ_HAVE_CUBLAS_HEADERS 1
#endif

namespace flashquant::bench {

#ifdef FQ_HAVE_CUBLAS_HEADERS

namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;
constexpr int kLtAlgorithms = 12;

void* OpenFirst(const char* first, const char* second) {
  void* library = dlopen(first, RTLD_NOW | RTLD_GLOBAL);
  return library != nullptr ? library : dlopen(second, RTLD_NOW | RTLD_GLOBAL);
}

struct LtCase {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr;
  cublasLtMatrixLayout_t x = nullptr;
  cublasLtMatrixLayout_t y = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
};

}  // namespace

struct CublasBaseline::State {
#define FQ_FUNCTION(library, name) \
  decltype(&::name) name =         \
      reinterpret_cast<decltype(&::name)>(library == nullptr ? nullptr : dlsym(library, #name))
  void* lt_library = OpenFirst("libcublasLt.so.13", "libcublasLt.so");
  void* library = OpenFirst("libcublas.so.13", "libcublas.so");
  FQ_FUNCTION(library, cublasCreate_v2);
  FQ_FUNCTION(library, cublasSetStream_v2);
  FQ_FUNCTION(library, cublasSetWorkspace_v2);
  FQ_FUNCTION(lt_library, cublasLtCreate);
  FQ_FUNCTION(lt_library, cublasLtMatmul);
  FQ_FUNCTION(lt_library, cublasLtMatmulDescCreate);
  FQ_FUNCTION(lt_library, cublasLtMatmulDescSetAttribute);
  FQ_FUNCTION(lt_library, cublasLtMatrixLayoutCreate);
  FQ_FUNCTION(lt_library, cublasLtMatmulPreferenceCreate);
  FQ_FUNCTION(lt_library, cublasLtMatmulPreferenceSetAttribute);
  FQ_FUNCTION(lt_library, cublasLtMatmulAlgoGetHeuristic);
#undef FQ_FUNCTION
  // Overloaded in the header, so its type is written out.
  using GemmEx = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int,
                                    int, const void*, const void*, cudaDataType, int, const void*,
                                    cudaDataType, int, const void*, void*, cudaDataType, int,
                                    cublasComputeType_t, cublasGemmAlgo_t);
  GemmEx gemm_ex =
      reinterpret_cast<GemmEx>(library == nullptr ? nullptr : dlsym(library, "cublasGemmEx"));

  cublasHandle_t handle = nullptr;
  cublasLtHandle_t lt_handle = nullptr;
  void* workspace = nullptr;
  int k = 0;
  int n = 0;
  int m = 0;
  std::vector<LtCase> lt_cases;

  // y as a column-major [n, m] matrix = op(weight) * x; transposed: weight stored [N, K].
  void AddLtCases(bool transposed) {
    LtCase base;
    const cublasOperation_t op = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulDescCreate(&base.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(base.operation, CUBLASLT_MATMUL_DESC_TRANSA, &op, sizeof(op));
    const auto rows = static_cast<uint64_t>(transposed ? k : n);
    const auto columns = static_cast<uint64_t>(transposed ? n : k);
    const auto batch = static_cast<uint64_t>(m);
    cublasLtMatrixLayoutCreate(&base.weight, CUDA_R_16BF, rows, columns, transposed ? k : n);
    cublasLtMatrixLayoutCreate(&base.x, CUDA_R_16BF, static_cast<uint64_t>(k), batch, k);
    cublasLtMatrixLayoutCreate(&base.y, CUDA_R_16BF, static_cast<uint64_t>(n), batch, n);
    cublasLtMatmulPreference_t preference = nullptr;
    cublasLtMatmulPreferenceCreate(&preference);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &kWorkspaceBytes, sizeof(kWorkspaceBytes));
    cublasLtMatmulHeuristicResult_t results[kLtAlgorithms] = {};
    int found = 0;
    cublasLtMatmulAlgoGetHeuristic(lt_handle, base.operation, base.weight, base.x, base.y, base.y,
                                   preference, kLtAlgorithms, results, &found);
    for (int i = 0; i < found; ++i) {
      base.algorithm = results[i].algo;
      lt_cases.push_back(base);
    }
  }

  bool RunGemmEx(bool transposed, const void* weight, const void* x, void* y, cudaStream_t stream) {
    return RunGemmEx(transposed, n, weight, x, y, stream);
  }
  // The first `count` columns of y.
  bool RunGemmEx(bool transposed, int count, const void* weight, const void* x, void* y,
                 cudaStream_t stream) {
    const float one = 1.0f;
    const float zero = 0.0f;
    cublasSetStream_v2(handle, stream);
    cublasSetWorkspace_v2(handle, workspace, kWorkspaceBytes);
    return gemm_ex(handle, transposed ? CUBLAS_OP_T : CUBLAS_OP_N, CUBLAS_OP_N, count, m, k, &one,
                   weight, CUDA_R_16BF, transposed ? k : n, x, CUDA_R_16BF, k, &zero, y,
                   CUDA_R_16BF, n, CUBLAS_COMPUTE_32F,
                   CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS;
  }
};

CublasBaseline::CublasBaseline() : state_(std::make_unique<State>()) {
  State& s = *state_;
  if (s.library == nullptr || s.lt_library == nullptr) return;
  if (s.cublasCreate_v2(&s.handle) != CUBLAS_STATUS_SUCCESS) s.handle = nullptr;
  if (s.cublasLtCreate(&s.lt_handle) != CUBLAS_STATUS_SUCCESS) s.handle = nullptr;
  if (cudaMalloc(&s.workspace, kWorkspaceBytes) != cudaSuccess) s.handle = nullptr;
}

CublasBaseline::~CublasBaseline() = default;

int CublasBaseline::Prepare(int k, int n, int m) {
  State& s = *state_;
  if (s.handle == nullptr) return 0;
  s.k = k;
  s.n = n;
  s.m = m;
  s.lt_cases.clear();
  s.AddLtCases(true);
  s.AddLtCases(false);
  return 2 + static_cast<int>(s.lt_cases.size());
}

bool CublasBaseline::Run(int algorithm, const void* weight, const void* x, void* y,
                         cudaStream_t stream) {
  State& s = *state_;
  if (algorithm < 2) return s.RunGemmEx(algorithm == 0, weight, x, y, stream);
  const LtCase& c = s.lt_cases[static_cast<size_t>(algorithm - 2)];
  const float one = 1.0f;
  const float zero = 0.0f;
  return s.cublasLtMatmul(s.lt_handle, c.operation, &one, weight, c.weight, x, c.x, &zero, y, c.y,
                          y, c.y, &c.algorithm, s.workspace, kWorkspaceBytes,
                          stream) == CUBLAS_STATUS_SUCCESS;
}

bool CublasBaseline::RunColumns(int first, int count, const void* weight, const void* x, void* y,
                                cudaStream_t stream) {
  return state_->RunGemmEx(true, count, weight, x, static_cast<uint16_t*>(y) + first, stream);
}

#else

struct CublasBaseline::State {};
CublasBaseline::CublasBaseline() = default;
CublasBaseline::~CublasBaseline() = default;
int CublasBaseline::Prepare(int, int, int) { return 0; }
bool CublasBaseline::Run(int, const void*, const void*, void*, cudaStream_t) { return false; }
bool CublasBaseline::RunColumns(int, int, const void*, const void*, void*, cudaStream_t) {
  return false;
}

#endif

}  // namespace flashquant::bench
