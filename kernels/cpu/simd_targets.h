// Which SIMD targets the kernels are compiled for. Include before any Highway header.
//
// AVX-512 with and without VNNI ("AVX3_DL", "AVX3"), AVX2, SSE4 and the portable baseline on
// x86-64; NEON on AArch64. Left out: SSSE3, which adds build time only, and the targets of unknown
// vector length, where vectors cannot stand in an array as the kernels need it.
#pragma once

// One set for all files: Highway's choice of the target is an inline function that depends on it.
#define HWY_WANT_AVX3_DL

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#endif
