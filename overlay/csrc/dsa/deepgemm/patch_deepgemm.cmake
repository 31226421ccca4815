# Puts the series' patch on the DeepGEMM source that vLLM is built with (docs/deepgemm.md). Called by
# cmake/external_projects/deepgemm.cmake; with VLLM_DSA_DEEPGEMM=OFF or VLLM_DSA=0 (cache or environment) it does
# nothing, as upstream; nor in a build without compute capability 9.0, the only one that uses the patch.
#
#   vllm_dsa_patch_deepgemm(LINE SOURCE_DIR)
#
# A source that vLLM fetched is patched here, once. A source of the user, DEEPGEMM_SRC_DIR, is never changed: it
# must carry the patch already.

option(VLLM_DSA_DEEPGEMM "Build DeepGEMM with MQA logits into a buffer of the caller" ON)
set(_vllm_dsa_deepgemm_dir "${CMAKE_CURRENT_LIST_DIR}")

function(vllm_dsa_patch_deepgemm line source)
  foreach(switch VLLM_DSA VLLM_DSA_DEEPGEMM)
    if(NOT "$ENV{${switch}}" STREQUAL "")
      set(${switch} "$ENV{${switch}}")
    endif()
    if(DEFINED ${switch} AND NOT ${switch})
      message(STATUS "DeepGEMM: left as it is (${switch}=${${switch}})")
      return()
    endif()
  endforeach()
  if(DEFINED CUDA_ARCHS AND NOT "${CUDA_ARCHS}" MATCHES "(^|;)9\\.0")
    message(STATUS "DeepGEMM: left as it is (only compute capability 9.0 uses the patch, not ${CUDA_ARCHS})")
    return()
  endif()
  set(without "cmake -DVLLM_DSA_DEEPGEMM=OFF (or VLLM_DSA_DEEPGEMM=OFF in the environment)")
  find_program(VLLM_DSA_GIT git)
  if(NOT VLLM_DSA_GIT)
    message(FATAL_ERROR
      "DeepGEMM: git, which checks and applies the patch of line ${line}, was not found.\n"
      "  fix: install git, or name it: cmake -DVLLM_DSA_GIT=/path/to/git\n"
      "  or build without the patch: ${without}")
  endif()
  set(patch "${_vllm_dsa_deepgemm_dir}/${line}.patch")
  get_filename_component(parent "${source}" DIRECTORY)
  # A source without a repository of its own may lie inside another one, where git apply would ignore the patch's
  # paths without a word: the ceiling keeps git from finding that one.
  set(git "${CMAKE_COMMAND}" -E env "GIT_CEILING_DIRECTORIES=${parent}" --unset=GIT_DIR --unset=GIT_WORK_TREE
    "${VLLM_DSA_GIT}" -c core.autocrlf=false -c apply.whitespace=nowarn -c apply.ignoreWhitespace=no apply)

  execute_process(COMMAND ${git} --check --reverse "${patch}" WORKING_DIRECTORY "${source}"
    RESULT_VARIABLE reverse OUTPUT_QUIET ERROR_QUIET)
  if(reverse EQUAL 0)
    message(STATUS "DeepGEMM: ${source} has the patch of line ${line}")
    return()
  endif()
  execute_process(COMMAND ${git} --check "${patch}" WORKING_DIRECTORY "${source}"
    RESULT_VARIABLE forward OUTPUT_QUIET ERROR_VARIABLE why)
  if(NOT forward EQUAL 0)
    message(FATAL_ERROR
      "DeepGEMM: the patch of line ${line} does not apply to ${source}:\n${why}"
      "It belongs to the commit that its line `Applies-To:` names (${patch}).\n"
      "  fix: use that source, or build without the patch: ${without}")
  endif()
  if(DEEPGEMM_SRC_DIR)
    message(FATAL_ERROR
      "DeepGEMM: DEEPGEMM_SRC_DIR=${source} lacks the patch ${patch}.\n"
      "  fix: git -C ${source} apply ${patch}\n"
      "  or build without it: ${without}")
  endif()
  execute_process(COMMAND ${git} "${patch}" WORKING_DIRECTORY "${source}"
    RESULT_VARIABLE applied ERROR_VARIABLE why)
  if(NOT applied EQUAL 0 OR NOT EXISTS "${source}/csrc/apis/mqa_logits_out.hpp")
    message(FATAL_ERROR "DeepGEMM: the patch ${patch} could not be applied to ${source}:\n${why}")
  endif()
  message(STATUS "DeepGEMM: applied the patch of line ${line} to ${source}")
endfunction()
