// See cusparse_baseline.h.
#include "kernels/bench/cusparse_baseline.h"

#include <dlfcn.h>

#include <algorithm>

#if __has_include(<cusparse.h>)
#include <cusparse.h>
#define FQ_HAVE_CUSPARSE_HEADER 1
#endif

namespace flashquant::bench {

#ifdef FQ_HAVE_CUSPARSE_HEADER

namespace {

constexpr cusparseSpMMAlg_t kAlgorithms[CusparseBaseline::kNumAlgorithms] = {
    CUSPARSE_SPMM_CSR_ALG1, CUSPARSE_SPMM_CSR_ALG2, CUSPARSE_SPMM_CSR_ALG3};
constexpr float kOne = 1.0f;

void* OpenLibrary() {
  void* library = dlopen("libcusparse.so.12", RTLD_NOW | RTLD_GLOBAL);
  return library != nullptr ? library : dlopen("libcusparse.so", RTLD_NOW | RTLD_GLOBAL);
}

}  // namespace

struct CusparseBaseline::State {
#define FQ_FUNCTION(name)  \
  decltype(&::name) name = \
      reinterpret_cast<decltype(&::name)>(library == nullptr ? nullptr : dlsym(library, #name))
  void* library = OpenLibrary();
  FQ_FUNCTION(cusparseCreate);
  FQ_FUNCTION(cusparseDestroy);
  FQ_FUNCTION(cusparseSetStream);
  FQ_FUNCTION(cusparseCreateCsr);
  FQ_FUNCTION(cusparseDestroySpMat);
  FQ_FUNCTION(cusparseCreateDnMat);
  FQ_FUNCTION(cusparseDestroyDnMat);
  FQ_FUNCTION(cusparseSpMM_bufferSize);
  FQ_FUNCTION(cusparseSpMM_preprocess);
  FQ_FUNCTION(cusparseSpMM);
#undef FQ_FUNCTION

  cusparseHandle_t handle = nullptr;
  cusparseSpMMAlg_t algorithm = CUSPARSE_SPMM_CSR_ALG1;
  cusparseDnMatDescr_t x = nullptr;
  cusparseDnMatDescr_t y = nullptr;
  std::vector<cusparseSpMatDescr_t> weights;
  std::vector<void*> buffers;  // one a copy: preprocessing leaves its result there

  bool Complete() const {
    return cusparseCreate != nullptr && cusparseDestroy != nullptr &&
           cusparseSetStream != nullptr && cusparseCreateCsr != nullptr &&
           cusparseDestroySpMat != nullptr && cusparseCreateDnMat != nullptr &&
           cusparseDestroyDnMat != nullptr && cusparseSpMM_bufferSize != nullptr &&
           cusparseSpMM_preprocess != nullptr && cusparseSpMM != nullptr;
  }

  void Clear() {
    for (cusparseSpMatDescr_t weight : weights) cusparseDestroySpMat(weight);
    for (void* buffer : buffers) cudaFree(buffer);
    weights.clear();
    buffers.clear();
    if (x != nullptr) cusparseDestroyDnMat(x);
    if (y != nullptr) cusparseDestroyDnMat(y);
    x = nullptr;
    y = nullptr;
  }

  // y^T [n, m] += W_O [n, k] * x^T [k, m], the dense ones by columns.
  bool AddCopy(const CsrPointers& csr) {
    cusparseSpMatDescr_t weight = nullptr;
    if (cusparseCreateCsr(&weight, csr.rows, csr.columns, csr.num_values, csr.row_begin, csr.column,
                          csr.value, CUSPARSE_INDEX_32I, CUSPARSE_INDEX_32I,
                          CUSPARSE_INDEX_BASE_ZERO, CUDA_R_16BF) != CUSPARSE_STATUS_SUCCESS) {
      return false;
    }
    weights.push_back(weight);
    size_t bytes = 0;
    if (cusparseSpMM_bufferSize(handle, CUSPARSE_OPERATION_NON_TRANSPOSE,
                                CUSPARSE_OPERATION_NON_TRANSPOSE, &kOne, weight, x, &kOne, y,
                                CUDA_R_32F, algorithm, &bytes) != CUSPARSE_STATUS_SUCCESS) {
      return false;
    }
    void* buffer = nullptr;
    if (cudaMalloc(&buffer, std::max<size_t>(bytes, 16)) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    buffers.push_back(buffer);
    return cusparseSpMM_preprocess(handle, CUSPARSE_OPERATION_NON_TRANSPOSE,
                                   CUSPARSE_OPERATION_NON_TRANSPOSE, &kOne, weight, x, &kOne, y,
                                   CUDA_R_32F, algorithm, buffer) == CUSPARSE_STATUS_SUCCESS;
  }
};

CusparseBaseline::CusparseBaseline() : state_(std::make_unique<State>()) {
  if (!state_->Complete()) return;
  if (state_->cusparseCreate(&state_->handle) != CUSPARSE_STATUS_SUCCESS) state_->handle = nullptr;
}

CusparseBaseline::~CusparseBaseline() {
  if (!available()) return;
  state_->Clear();
  state_->cusparseDestroy(state_->handle);
}

bool CusparseBaseline::available() const { return state_->handle != nullptr; }

bool CusparseBaseline::Prepare(int algorithm, const std::vector<CsrPointers>& copies, int m,
                               const void* x, void* y) {
  State& s = *state_;
  if (!available() || copies.empty()) return false;
  s.Clear();
  s.algorithm = kAlgorithms[algorithm];
  s.cusparseSetStream(s.handle, nullptr);
  const int64_t k = copies[0].columns;
  const int64_t n = copies[0].rows;
  if (s.cusparseCreateDnMat(&s.x, k, m, k, const_cast<void*>(x), CUDA_R_16BF, CUSPARSE_ORDER_COL) !=
          CUSPARSE_STATUS_SUCCESS ||
      s.cusparseCreateDnMat(&s.y, n, m, n, y, CUDA_R_16BF, CUSPARSE_ORDER_COL) !=
          CUSPARSE_STATUS_SUCCESS) {
    return false;
  }
  return std::all_of(copies.begin(), copies.end(),
                     [&](const CsrPointers& csr) { return s.AddCopy(csr); });
}

bool CusparseBaseline::Run(int i, cudaStream_t stream) {
  State& s = *state_;
  const auto index = static_cast<size_t>(i);
  return s.cusparseSetStream(s.handle, stream) == CUSPARSE_STATUS_SUCCESS &&
         s.cusparseSpMM(s.handle, CUSPARSE_OPERATION_NON_TRANSPOSE,
                        CUSPARSE_OPERATION_NON_TRANSPOSE, &kOne, s.weights[index], s.x, &kOne, s.y,
                        CUDA_R_32F, s.algorithm, s.buffers[index]) == CUSPARSE_STATUS_SUCCESS;
}

#else

struct CusparseBaseline::State {};
CusparseBaseline::CusparseBaseline() = default;
CusparseBaseline::~CusparseBaseline() = default;
bool CusparseBaseline::available() const { return false; }
bool CusparseBaseline::Prepare(int, const std::vector<CsrPointers>&, int, const void*, void*) {
  return false;
}
bool CusparseBaseline::Run(int, cudaStream_t) { return false; }

#endif

}  // namespace flashquant::bench
