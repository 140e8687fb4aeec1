# `cmake --install` and the Debian package (CPack): the program, the demo model, a systemd unit and its configuration.
#
#   cmake --install build/cpu --strip                  below CMAKE_INSTALL_PREFIX, configuration in its etc/
#   cmake --workflow --preset deb                      build/deb/flashquant_VERSION_ARCH.deb
# A CUDA build makes flashquant-cuda, which takes the place of flashquant.
include(GNUInstallDirs)

install(TARGETS flashquant RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY deploy/demo-model DESTINATION ${CMAKE_INSTALL_DATADIR}/flashquant)
install(FILES README.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright)

# The unit and the configuration name absolute places, which are known only when it is installed (--prefix).
install(CODE "
  set(fq_source [[${PROJECT_SOURCE_DIR}]])
  set(fq_binary [[${PROJECT_BINARY_DIR}]])
  set(fq_cuda [[${FQ_ENABLE_CUDA}]])
  set(fq_bindir [[${CMAKE_INSTALL_BINDIR}]])
  set(fq_datadir [[${CMAKE_INSTALL_DATADIR}]])")
install(SCRIPT deploy/cmake/InstallService.cmake)

if(FQ_ENABLE_CUDA)
  set(CPACK_PACKAGE_NAME flashquant-cuda)
  # Not in Debian: NVIDIA's repository or an installed toolkit. The driver brings libcuda.
  set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libcublas-${CUDAToolkit_VERSION_MAJOR}-${CUDAToolkit_VERSION_MINOR}")
  set(CPACK_DEBIAN_PACKAGE_CONFLICTS flashquant)
  set(CPACK_DEBIAN_PACKAGE_REPLACES flashquant)
  set(CPACK_DEBIAN_PACKAGE_PROVIDES flashquant)
else()
  set(CPACK_PACKAGE_NAME flashquant)
  set(CPACK_DEBIAN_PACKAGE_CONFLICTS flashquant-cuda)
  set(CPACK_DEBIAN_PACKAGE_REPLACES flashquant-cuda)
endif()
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_VENDOR "FlashQuant")
set(CPACK_PACKAGE_CONTACT "The FlashQuant developers <flashquant@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "gRPC server for text generation with 4-bit language models")
set(CPACK_PACKAGE_DESCRIPTION
  "Serves language models whose weights are INT4 with sparse BF16 outliers, from the CPU\nor an NVIDIA GPU (package flashquant-cuda). Contains the program, a small demo model\nand a systemd service, which is not started by the installation.")
set(CPACK_STRIP_FILES ON)
# DESTDIR, so that the unit and the configuration get the places that they have on the target.
set(CPACK_SET_DESTDIR ON)
set(CPACK_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA
  ${PROJECT_SOURCE_DIR}/deploy/debian/conffiles
  ${PROJECT_SOURCE_DIR}/deploy/debian/postinst
  ${PROJECT_SOURCE_DIR}/deploy/debian/prerm
  ${PROJECT_SOURCE_DIR}/deploy/debian/postrm)
include(CPack)
