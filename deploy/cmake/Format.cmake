# Targets `format` and `format-check`: clang-format 14 with .clang-format over every C++ source that git knows or
# could know. Left out where clang-format-14 or git is missing: formatting is checked by tests/run.sh --full.

find_program(FQ_CLANG_FORMAT NAMES clang-format-14)
find_program(FQ_GIT NAMES git)
if(FQ_CLANG_FORMAT AND FQ_GIT)
  set(list_sources "${FQ_GIT} ls-files --cached --others --exclude-standard -- '*.h' '*.cc' '*.cu' '*.cuh' ':!tests/lint/fixtures'")
  add_custom_target(format
    COMMAND sh -c "${list_sources} | xargs -r ${FQ_CLANG_FORMAT} -i"
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} VERBATIM)
  add_custom_target(format-check
    COMMAND sh -c "${list_sources} | xargs -r ${FQ_CLANG_FORMAT} --dry-run --Werror"
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} VERBATIM)
endif()
