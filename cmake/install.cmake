# SPDX-License-Identifier: Apache-2.0
# What is installed, and how others find it. Every path in the package is relative to the file that holds it,
# so a prefix can be moved and may hold spaces.

include(CMakePackageConfigHelpers)

# ---- what a static consumer links beside libgdn.a ----

set(GDN_STATIC_LINK ${GDN_LIBXSMM_LINK})
set(directories ${HWLOC_LIBRARY_DIRS})
foreach(name IN LISTS OpenMP_C_LIB_NAMES)
  get_filename_component(directory "${OpenMP_${name}_LIBRARY}" DIRECTORY)
  list(APPEND directories "${directory}")
endforeach()
foreach(directory IN LISTS directories)
  if(directory AND NOT directory IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
    list(APPEND GDN_STATIC_LINK "-L${directory}")
  endif()
endforeach()
foreach(name IN LISTS HWLOC_LIBRARIES OpenMP_C_LIB_NAMES)
  list(APPEND GDN_STATIC_LINK "-l${name}")
endforeach()
list(APPEND GDN_STATIC_LINK -lpthread -ldl -lrt -lm)
list(REMOVE_DUPLICATES GDN_STATIC_LINK)

# ---- targets ----

install(TARGETS gdn EXPORT gdn-targets)
install(FILES include/gdn.h TYPE INCLUDE)
if(GDN_STATIC)
  # An interface of its own: gdn::gdn must not ask its users for the libraries that only libgdn.a needs.
  target_include_directories(gdn_static INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  foreach(argument IN LISTS GDN_STATIC_LINK)
    if(argument MATCHES "^-L(.*)")
      target_link_directories(gdn_static INTERFACE "${CMAKE_MATCH_1}")
    else()
      target_link_libraries(gdn_static INTERFACE "${argument}")
    endif()
  endforeach()
  install(TARGETS gdn_static EXPORT gdn-targets)
endif()

# ---- CMake package ----

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/gdn")
install(EXPORT gdn-targets NAMESPACE gdn:: DESTINATION "${package_dir}")
configure_package_config_file(cmake/gdn-config.cmake.in "${PROJECT_BINARY_DIR}/gdn-config.cmake"
  INSTALL_DESTINATION "${package_dir}")
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/gdn-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/gdn-config.cmake" "${PROJECT_BINARY_DIR}/gdn-config-version.cmake"
  DESTINATION "${package_dir}")

# ---- pkg-config ----

set(pkgconfig_dir "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  string(REPLACE " " "\\ " GDN_PC_PREFIX "${CMAKE_INSTALL_PREFIX}")
else()
  file(RELATIVE_PATH up "/${pkgconfig_dir}" "/")
  string(REGEX REPLACE "/$" "" up "${up}")
  set(GDN_PC_PREFIX "\${pcfiledir}/${up}")
endif()
foreach(name LIB INCLUDE)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${name}DIR}")
    set(GDN_PC_${name}DIR "${CMAKE_INSTALL_${name}DIR}")
  else()
    set(GDN_PC_${name}DIR "\${prefix}/${CMAKE_INSTALL_${name}DIR}")
  endif()
endforeach()
set(GDN_PC_LIBS_PRIVATE "")
foreach(argument IN LISTS GDN_STATIC_LINK)
  string(REPLACE " " "\\ " argument "${argument}")
  string(APPEND GDN_PC_LIBS_PRIVATE " ${argument}")
endforeach()
string(STRIP "${GDN_PC_LIBS_PRIVATE}" GDN_PC_LIBS_PRIVATE)
configure_file(libgdn.pc.in libgdn.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/libgdn.pc" DESTINATION "${pkgconfig_dir}")

# ---- uninstall ----

if(PROJECT_IS_TOP_LEVEL)
  add_custom_target(uninstall
    COMMAND "${CMAKE_COMMAND}" "-DMANIFEST=${PROJECT_BINARY_DIR}/install_manifest.txt"
      -P "${PROJECT_SOURCE_DIR}/cmake/uninstall.cmake"
    COMMENT "Removing what the last install wrote"
    VERBATIM)
endif()
