# Warnings, hardening, sanitizers and ccache, in one place. Only fq_library / fq_executable / fq_test
# (Targets.cmake) apply them, so generated and third-party code keeps its own warnings.

find_program(FQ_CCACHE ccache)
if(FQ_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${FQ_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${FQ_CCACHE})
endif()

# Debug information is worth its link time only for line numbers in back traces.
string(REPLACE "-g" "-g1" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")

add_library(fq_flags INTERFACE)
target_include_directories(fq_flags INTERFACE ${PROJECT_SOURCE_DIR})
target_compile_options(fq_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -Wvla -Wnon-virtual-dtor
    # Designated initializers name what they set and leave the rest to its default, on purpose.
    -Wno-missing-field-initializers>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FQ_WERROR}>>:-Werror>
  # g++ 12 reports false positives of these inside libstdc++ and fmt at -O2.
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-array-bounds>)
# clang counts sign conversions as -Wconversion, g++ does not; and only clang can check the lock annotations.
target_compile_options(fq_flags INTERFACE
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:-Wno-sign-conversion -Wthread-safety>)
if(NOT FQ_SANITIZE)
  target_compile_definitions(fq_flags INTERFACE $<$<NOT:$<CONFIG:Debug>>:_FORTIFY_SOURCE=2>)
endif()

if(FQ_SANITIZE)
  # Everything is instrumented, generated code too; a report ends the program. The check of dynamic
  # types looks at an object through a pipe: a server that a test leaves without file descriptors
  # would be reported for nothing.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FQ_SANITIZE}>
    $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
    $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>
    $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=vptr>)
  add_link_options(-fsanitize=${FQ_SANITIZE})
endif()
if(FQ_BUILD_FUZZ)
  # Coverage counters in our own libraries, so that libFuzzer sees where an input leads.
  target_compile_options(fq_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

if(FQ_CLANG_TIDY)
  find_program(FQ_CLANG_TIDY_EXE NAMES clang-tidy-14 REQUIRED)
endif()
