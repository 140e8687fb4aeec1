# Turns on CUDA. Asking for it without a toolkit is an error: no silent fallback.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 86 89 90 120)
endif()
enable_language(CUDA)
# The module of CMake 3.25 marks nvToolsExt as deprecated for projects that ask for 3.25, without looking whether it is
# there; CUDA 13 has it no more, and the search would fail.
set(fq_cmake_minimum ${CMAKE_MINIMUM_REQUIRED_VERSION})
set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
find_package(CUDAToolkit REQUIRED)
set(CMAKE_MINIMUM_REQUIRED_VERSION ${fq_cmake_minimum})
# CMake 3.25 does not know how to ask nvcc for C++20, though nvcc 12 and later have it.
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
