# What `cmake --install` puts where. A target that this build leaves out is left out here as well.
#
#   include/polykv/                  public headers
#   lib/libpolykv.so, pkgconfig/, cmake/polykv/
#   lib/libpolykv_cuda.so            loaded by libpolykv and polykvd for documents on a GPU
#   bin/polykvd, bin/polykvctl
#   libexec/polykv/polykv-prefill    started by polykvd, never by a person
#   lib/systemd/, lib/sysusers.d/, lib/tmpfiles.d/
include(CMakePackageConfigHelpers)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/polykv ${PROJECT_BINARY_DIR}/include/polykv
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")

if(TARGET polykv)
  install(TARGETS polykv EXPORT polykvTargets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  set(polykv_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/polykv)
  install(EXPORT polykvTargets NAMESPACE polykv:: DESTINATION ${polykv_cmake_dir})
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/polykvConfig.cmake.in
    ${PROJECT_BINARY_DIR}/polykvConfig.cmake INSTALL_DESTINATION ${polykv_cmake_dir})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/polykvConfigVersion.cmake
    COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/polykvConfig.cmake ${PROJECT_BINARY_DIR}/polykvConfigVersion.cmake
    DESTINATION ${polykv_cmake_dir})

  # The .pc file finds its prefix from where it lies, so that a moved tree still works.
  file(RELATIVE_PATH polykv_pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
  string(REGEX REPLACE "/$" "" polykv_pc_to_prefix "${polykv_pc_to_prefix}")
  configure_file(${PROJECT_SOURCE_DIR}/cmake/polykv.pc.in ${PROJECT_BINARY_DIR}/polykv.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/polykv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

if(TARGET polykv_cuda)
  install(TARGETS polykv_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
endif()

foreach(program polykvd polykvctl)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()
if(TARGET polykv-prefill)
  install(TARGETS polykv-prefill RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/polykv)
endif()

# systemd looks for units in /usr/lib and in /usr/local/lib, never in an architecture's library
# folder.
foreach(folder system user)
  file(GLOB unit_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/systemd/${folder}/*.in)
  foreach(unit_file IN LISTS unit_files)
    get_filename_component(unit ${unit_file} NAME_WLE)
    configure_file(${unit_file} ${PROJECT_BINARY_DIR}/systemd/${folder}/${unit} @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/systemd/${folder}/${unit} DESTINATION lib/systemd/${folder})
  endforeach()
endforeach()
install(FILES ${PROJECT_SOURCE_DIR}/systemd/polykv.sysusers RENAME polykv.conf DESTINATION lib/sysusers.d)
install(FILES ${PROJECT_SOURCE_DIR}/systemd/polykv.tmpfiles RENAME polykv.conf DESTINATION lib/tmpfiles.d)

install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/CHANGELOG.md
  DESTINATION ${CMAKE_INSTALL_DOCDIR})
