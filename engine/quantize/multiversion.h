// FQ_MULTIVERSION: has the compiler make a function for several x86-64 levels and choose one when
// the program starts. For the element-wise loops of the quantizer only; kernels use Highway.
//
// Results do not depend on the level: these loops add in fixed lanes, and their files are built
// without contraction to fused multiply-add. Sanitizers start after the choice is made and would
// crash in it, so with them there is one version.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FQ_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FQ_MULTIVERSION
#endif
