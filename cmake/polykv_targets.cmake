# Every target of ours goes through polykv_target, so that warnings, sanitizers and include roots are
# set in one place. Sources include by path from the repository's root: #include "common/result.h".
function(polykv_target target)
  target_compile_options(${target} PRIVATE -Wall -Wextra
    $<$<BOOL:${POLYKV_WERROR}>:-Werror>
    $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Wold-style-cast>)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}
    ${PROJECT_SOURCE_DIR}/include ${PROJECT_BINARY_DIR}/include)
  if(POLYKV_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${POLYKV_SANITIZE}
      -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${POLYKV_SANITIZE})
  endif()
endfunction()

# Parsing the standard library, flatbuffers and Catch2 is most of a build's time, so libraries share one precompiled
# header (that of polykv_common) and tests another. CMAKE_DISABLE_PRECOMPILE_HEADERS=ON does without.
function(polykv_use_common_precompiled_header target)
  target_precompile_headers(${target} REUSE_FROM polykv_common)
endfunction()

# polykv_test(name SOURCES ... LIBS ... [LABELS ...] [TIMEOUT seconds] [PROCESSORS count]): a Catch2
# program that ctest runs as one test. PROCESSORS: how many of ctest's parallel slots it takes.
# Exit code 77 means "skipped: this machine lacks something", and says what.
function(polykv_test name)
  cmake_parse_arguments(arg "" "TIMEOUT;PROCESSORS" "SOURCES;LIBS;LABELS;ENVIRONMENT" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  polykv_target(${name})
  target_compile_options(${name} PRIVATE -O0)  # what is tested is optimised; optimising tests doubles the build
  if(POLYKV_SANITIZE)
    target_compile_options(${name} PRIVATE -g0)  # a report's frames are in what is tested
  endif()
  target_link_libraries(${name} PRIVATE polykv_catch_main ${arg_LIBS})
  if(NOT "${arg_SOURCES}" MATCHES "[.]c(;|$)")  # C has no precompiled header here
    target_precompile_headers(${name} REUSE_FROM polykv_test_precompiled)
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  add_test(NAME ${name} COMMAND ${name} --durations yes)
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${arg_TIMEOUT}
    PROCESSORS ${arg_PROCESSORS} LABELS "${arg_LABELS}" ENVIRONMENT "${arg_ENVIRONMENT}")
endfunction()
