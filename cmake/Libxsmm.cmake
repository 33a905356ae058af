# SPDX-License-Identifier: Apache-2.0
# Finds libxsmm, 1.17 (Debian's static archive) or 2.x (static or shared), and defines
#   gdn_libxsmm          interface target for the build
#   GDN_LIBXSMM_VERSION  for example 1.17.0
#   GDN_LIBXSMM_LINK     what a static consumer of libgdn links, as linker arguments
# LIBXSMM_ROOT names the prefix, or source tree, to use before all others.

set(LIBXSMM_ROOT "" CACHE PATH "Prefix of libxsmm; empty = pkg-config, then the system's")

set(hints "")
if(LIBXSMM_ROOT)
  list(APPEND hints "${LIBXSMM_ROOT}")
  set(only_hints NO_DEFAULT_PATH)
else()
  set(only_hints "")
  find_package(PkgConfig QUIET)
  if(PKG_CONFIG_FOUND)
    pkg_check_modules(PC_LIBXSMM QUIET libxsmm)
    # Debian's libxsmm.pc names only the prefix reliably: both archives are looked for below it.
    list(APPEND hints ${PC_LIBXSMM_PREFIX})
  endif()
endif()

# A changed root must not leave the libraries of the last one in the cache.
if(NOT "${GDN_LIBXSMM_ROOT_SEEN}" STREQUAL "${LIBXSMM_ROOT}")
  unset(LIBXSMM_INCLUDE_DIR CACHE)
  unset(LIBXSMM_LIBRARY CACHE)
  unset(LIBXSMM_NOBLAS_LIBRARY CACHE)
endif()
set(GDN_LIBXSMM_ROOT_SEEN "${LIBXSMM_ROOT}" CACHE INTERNAL "LIBXSMM_ROOT of the last search")

find_path(LIBXSMM_INCLUDE_DIR libxsmm.h HINTS ${hints} PATH_SUFFIXES include include/libxsmm ${only_hints})
# The archive first: linked in with its symbols hidden, it cannot meet another libxsmm of the host.
find_library(LIBXSMM_LIBRARY NAMES libxsmm.a xsmm HINTS ${hints} PATH_SUFFIXES lib lib64 ${only_hints})
get_filename_component(library_dir "${LIBXSMM_LIBRARY}" DIRECTORY)
find_library(LIBXSMM_NOBLAS_LIBRARY NAMES libxsmmnoblas.a xsmmnoblas PATHS "${library_dir}" NO_DEFAULT_PATH)
mark_as_advanced(LIBXSMM_INCLUDE_DIR LIBXSMM_LIBRARY LIBXSMM_NOBLAS_LIBRARY)

if(NOT LIBXSMM_INCLUDE_DIR OR NOT LIBXSMM_LIBRARY)
  message(FATAL_ERROR "libxsmm not found: install libxsmm-dev, or set LIBXSMM_ROOT to a prefix that holds "
    "include/libxsmm.h and lib/libxsmm.a")
endif()

# The numbers are spread over generated headers that differ between releases, so let the preprocessor find them.
file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/libxsmm_version.c"
  "#include <libxsmm.h>\ngdn_version LIBXSMM_VERSION_MAJOR.LIBXSMM_VERSION_MINOR.LIBXSMM_VERSION_UPDATE\n")
execute_process(
  COMMAND "${CMAKE_C_COMPILER}" -E -P "-I${LIBXSMM_INCLUDE_DIR}"
    "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/libxsmm_version.c"
  OUTPUT_VARIABLE text ERROR_QUIET)
set(GDN_LIBXSMM_VERSION "")
if(text MATCHES "gdn_version *([0-9]+) *\\. *([0-9]+) *\\. *([0-9]+)")
  set(GDN_LIBXSMM_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
endif()
if(NOT GDN_LIBXSMM_VERSION)
  set(GDN_LIBXSMM_VERSION "unknown")
elseif(GDN_LIBXSMM_VERSION VERSION_LESS 1.17)
  message(FATAL_ERROR "libxsmm ${GDN_LIBXSMM_VERSION} is too old: 1.17 or later is needed")
endif()

set(libraries "${LIBXSMM_LIBRARY}")
if(LIBXSMM_NOBLAS_LIBRARY)
  list(APPEND libraries "${LIBXSMM_NOBLAS_LIBRARY}")
endif()
add_library(gdn_libxsmm INTERFACE)
target_include_directories(gdn_libxsmm SYSTEM INTERFACE "${LIBXSMM_INCLUDE_DIR}")
target_compile_definitions(gdn_libxsmm INTERFACE GDN_HAVE_LIBXSMM)
target_link_libraries(gdn_libxsmm INTERFACE ${libraries} ${CMAKE_DL_LIBS} rt m)

# In a directory that every linker searches names suffice, and the package stays usable elsewhere.
set(GDN_LIBXSMM_LINK "")
foreach(library IN LISTS libraries)
  get_filename_component(directory "${library}" DIRECTORY)
  get_filename_component(name "${library}" NAME_WE)
  string(REGEX REPLACE "^lib" "" name "${name}")
  if(NOT directory IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
    list(APPEND GDN_LIBXSMM_LINK "-L${directory}")
  endif()
  list(APPEND GDN_LIBXSMM_LINK "-l${name}")
endforeach()
list(REMOVE_DUPLICATES GDN_LIBXSMM_LINK)
message(STATUS "libxsmm ${GDN_LIBXSMM_VERSION}: ${libraries}")
