#include "kernels/cuda/backend/cublas_library.h"

#include <dlfcn.h>

#include <string>

#include "kernels/base/status_macros.h"

namespace flashquant::cuda {
namespace {

absl::StatusOr<CublasLibrary> Load() {
  const std::string name = fmt::format("libcublas.so.{}", CUBLAS_VER_MAJOR);
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  // Where the toolkit was when this was built, for machines whose linker does not search there.
  if (handle == nullptr) {
    handle = dlopen((std::string(FQ_CUBLAS_DIRECTORY "/") + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (handle == nullptr) {
    return UnavailableError("backend 'cuda': {} not found; install cuBLAS {}, or use --backend cpu",
                            name, CUBLAS_VER_MAJOR);
  }
  CublasLibrary library;
  bool complete = true;
  const auto find = [&](auto* function, const char* symbol) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(handle, symbol));
    complete = complete && *function != nullptr;
  };
  find(&library.create, "cublasCreate_v2");
  find(&library.destroy, "cublasDestroy_v2");
  find(&library.set_stream, "cublasSetStream_v2");
  find(&library.set_workspace, "cublasSetWorkspace_v2");
  find(&library.set_math_mode, "cublasSetMathMode");
  find(&library.gemm_ex, "cublasGemmEx");
  if (!complete) return UnavailableError("backend 'cuda': {} lacks functions", name);
  return library;
}

}  // namespace

absl::StatusOr<const CublasLibrary*> OpenCublas() {
  static const absl::StatusOr<CublasLibrary> library = Load();
  if (!library.ok()) return library.status();
  return &*library;
}

}  // namespace flashquant::cuda
