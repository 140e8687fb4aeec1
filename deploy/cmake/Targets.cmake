# The only ways a target of ours is made: warnings, include root, sanitizers and labels in one place.

# Lets clang-tidy (.clang-tidy) read every source of `name` when FQ_CLANG_TIDY is on. Tests are left out: the
# macros of GoogleTest trip half of the checks.
function(fq_tidy name)
  if(FQ_CLANG_TIDY)
    set_target_properties(${name} PROPERTIES CXX_CLANG_TIDY "${FQ_CLANG_TIDY_EXE};--quiet;--warnings-as-errors=*")
  endif()
endfunction()

# fq_library(NAME SRCS a.cc b.h DEPS x y): a static library; header-only ones become INTERFACE.
function(fq_library name)
  cmake_parse_arguments(arg "" "" "SRCS;DEPS" ${ARGN})
  set(compiled ${arg_SRCS})
  list(FILTER compiled INCLUDE REGEX "\\.(cc|cu)$")
  if(compiled)
    add_library(${name} STATIC ${arg_SRCS})
    target_link_libraries(${name} PRIVATE fq_flags PUBLIC ${arg_DEPS})
    target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
    fq_tidy(${name})
  else()
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${name} INTERFACE ${arg_DEPS})
  endif()
endfunction()

# fq_executable(NAME SRCS a.cc DEPS x y)
function(fq_executable name)
  cmake_parse_arguments(arg "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${arg_SRCS})
  target_link_libraries(${name} PRIVATE fq_flags ${arg_DEPS})
  fq_tidy(${name})
endfunction()

# fq_test(NAME SRC file_test.cc LABEL unit DEPS x y [TIMEOUT seconds]): one binary per file, one label per
# binary (gtest_discover_tests loses properties after a list-valued LABELS, so LABELS stands last).
# Tests run with the repository root as working directory.
function(fq_test name)
  cmake_parse_arguments(arg "" "SRC;LABEL;TIMEOUT" "DEPS" ${ARGN})
  if(NOT FQ_BUILD_TESTS)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_executable(${name} ${arg_SRC})
  target_link_libraries(${name} PRIVATE fq_flags ${arg_DEPS} GTest::gmock GTest::gtest_main)
  gtest_discover_tests(${name}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS ${arg_LABEL})
endfunction()

# fq_bench(NAME SRC file_bench.cc DEPS x y)
function(fq_bench name)
  cmake_parse_arguments(arg "" "SRC" "DEPS" ${ARGN})
  if(NOT FQ_BUILD_BENCH)
    return()
  endif()
  add_executable(${name} ${arg_SRC})
  target_link_libraries(${name} PRIVATE fq_flags ${arg_DEPS} benchmark::benchmark)
endfunction()

# fq_fuzz(NAME SRC file_fuzz.cc CORPUS dir DEPS x y): with FQ_BUILD_FUZZ a libFuzzer binary, which CTest runs for
# FQ_FUZZ_SECONDS from the corpus; in the normal suite the same harness replays its committed corpus through
# tests/fuzz/replay_main.cc. New inputs are kept in the build folder; a crash is copied to the corpus by hand.
function(fq_fuzz name)
  cmake_parse_arguments(arg "" "SRC;CORPUS" "DEPS" ${ARGN})
  get_filename_component(corpus ${arg_CORPUS} ABSOLUTE)
  if(FQ_BUILD_FUZZ)
    add_executable(${name} ${arg_SRC})
    target_link_libraries(${name} PRIVATE fq_flags ${arg_DEPS})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    set(found ${CMAKE_CURRENT_BINARY_DIR}/${name}_found)
    file(MAKE_DIRECTORY ${found})
    math(EXPR limit "${FQ_FUZZ_SECONDS} + 120")
    add_test(NAME ${name}.fuzz COMMAND ${name} -max_total_time=${FQ_FUZZ_SECONDS} -timeout=10
      -rss_limit_mb=2048 -artifact_prefix=${CMAKE_CURRENT_BINARY_DIR}/ ${found} ${corpus})
    set_tests_properties(${name}.fuzz PROPERTIES TIMEOUT ${limit} LABELS fuzz)
  elseif(FQ_BUILD_TESTS)
    add_executable(${name}_replay ${arg_SRC} ${PROJECT_SOURCE_DIR}/tests/fuzz/replay_main.cc)
    target_link_libraries(${name}_replay PRIVATE fq_flags ${arg_DEPS})
    add_test(NAME ${name}.corpus COMMAND ${name}_replay ${corpus})
    set_tests_properties(${name}.corpus PROPERTIES
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} TIMEOUT 120 LABELS unit)
  endif()
endfunction()
