# find_package(fmoe): the target fmoe::fmoe, which has the headers of include/fmoe, the operators and LibTorch; and
# fmoe::headers without the operators, for a library that Python loads beside fmoe_ext, which has them.
#
# The operators are in lib/libfmoe.so of an installed prefix or of a build's folder, and in _C.abi3.so of a wheel.
# Those for CUDA, where LibTorch has CUDA too, are in libfmoe_cuda.so or _C_cuda.abi3.so.
get_filename_component(_fmoe_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET torch)
  find_package(Torch QUIET)
endif()
if(NOT TARGET torch)
  set(fmoe_FOUND FALSE)
  set(fmoe_NOT_FOUND_MESSAGE
      "fmoe needs LibTorch: add the folder that `python -c 'import torch; print(torch.utils.cmake_prefix_path)'` prints \
to CMAKE_PREFIX_PATH")
  return()
endif()

if(NOT fmoe_LIBRARIES)
  file(GLOB _fmoe_folders "${_fmoe_root}/lib/*-linux-gnu")
  list(APPEND _fmoe_folders "${_fmoe_root}/lib" "${_fmoe_root}/lib64" "${_fmoe_root}")
  set(_fmoe_modules "libfmoe.so _C.abi3.so")
  if(TARGET torch_cuda) # A LibTorch for CPUs lacks what the other one calls.
    list(APPEND _fmoe_modules "libfmoe_cuda.so _C_cuda.abi3.so")
  endif()
  foreach(_fmoe_names IN LISTS _fmoe_modules)
    string(REPLACE " " ";" _fmoe_names "${_fmoe_names}")
    unset(_fmoe_library CACHE)
    find_file(_fmoe_library NAMES ${_fmoe_names} PATHS ${_fmoe_folders} NO_DEFAULT_PATH)
    if(_fmoe_library)
      list(APPEND fmoe_LIBRARIES "${_fmoe_library}")
    endif()
    unset(_fmoe_library CACHE)
  endforeach()
endif()
if(NOT fmoe_LIBRARIES)
  set(fmoe_FOUND FALSE)
  set(fmoe_NOT_FOUND_MESSAGE "no libfmoe.so or _C.abi3.so in ${_fmoe_folders}: build it first")
  return()
endif()

if(NOT TARGET fmoe::fmoe)
  add_library(fmoe::headers INTERFACE IMPORTED)
  set_target_properties(fmoe::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${_fmoe_root}/include"
                                                 INTERFACE_LINK_LIBRARIES torch)
  target_compile_features(fmoe::headers INTERFACE cxx_std_20)
  add_library(fmoe::fmoe INTERFACE IMPORTED)
  # No symbol of the operators is called: they register themselves when they are loaded, which the linker must not undo.
  set(_fmoe_link)
  foreach(_fmoe_library IN LISTS fmoe_LIBRARIES)
    get_filename_component(_fmoe_folder "${_fmoe_library}" DIRECTORY)
    list(APPEND _fmoe_link "-Wl,-rpath,${_fmoe_folder}" "-Wl,--push-state,--no-as-needed,${_fmoe_library},--pop-state")
  endforeach()
  set_target_properties(fmoe::fmoe PROPERTIES INTERFACE_LINK_LIBRARIES "${_fmoe_link};fmoe::headers")
endif()
set(fmoe_FOUND TRUE)
