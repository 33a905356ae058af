# SPDX-License-Identifier: Apache-2.0
# The tiers of this build: the only place with -m flags. One call per tier, lowest first.
#
#   gdn_tier(<name> FLAGS <compiler flags> FILES <sources> [PROBE <expression of immintrin.h>])
#
# A tier whose probe does not compile with its flags is dropped with a message; one that stays defines
# GDN_HAVE_<NAME> for the whole build. To add a tier: one more call here, its row in src/kernels/table.c.

include(CheckCSourceCompiles)

# FMA only where a kernel writes it: contraction would let equal operations in two kernels round differently.
set(GDN_KERNEL_FLAGS -O3 -ffp-contract=off)

set(GDN_KERNEL_SOURCES "")
set(GDN_TIER_DEFINITIONS "")
set(GDN_TIERS "")

function(gdn_tier name)
  cmake_parse_arguments(PARSE_ARGV 1 TIER "" "PROBE" "FLAGS;FILES")
  string(TOUPPER ${name} TIER_NAME)
  if(TIER_PROBE)
    string(JOIN " " CMAKE_REQUIRED_FLAGS ${TIER_FLAGS})
    check_c_source_compiles(
      "#include <immintrin.h>
      int main(int argc, char **argv) { (void)argv; volatile int x = argc; (void)x; ${TIER_PROBE} return 0; }"
      GDN_BUILDS_${TIER_NAME})
  else()
    set(GDN_BUILDS_${TIER_NAME} TRUE)
  endif()
  set(GDN_FILES_${name} ${TIER_FILES} PARENT_SCOPE) # built or not: tests emulate them
  if(GDN_BUILDS_${TIER_NAME})
    set(GDN_TIERS ${GDN_TIERS} ${name} PARENT_SCOPE)
    set(GDN_FLAGS_${TIER_NAME} ${TIER_FLAGS} PARENT_SCOPE)
    set(GDN_TIER_DEFINITIONS ${GDN_TIER_DEFINITIONS} GDN_HAVE_${TIER_NAME} PARENT_SCOPE)
    set(GDN_KERNEL_SOURCES ${GDN_KERNEL_SOURCES} ${TIER_FILES} PARENT_SCOPE)
    set_source_files_properties(${TIER_FILES} PROPERTIES COMPILE_OPTIONS "${GDN_KERNEL_FLAGS};${TIER_FLAGS}")
  else()
    message(STATUS "Tier ${name} dropped: the compiler does not build it with ${TIER_FLAGS}")
  endif()
endfunction()

gdn_tier(ref
  FILES src/kernels/recur_ref.c src/kernels/chunk_ref.c)

gdn_tier(avx2
  FLAGS -mavx2 -mfma -mf16c
  FILES src/kernels/recur_avx2.c src/kernels/chunk_avx2.c
  PROBE "__m256 a = _mm256_set1_ps((float)argc); a = _mm256_fmadd_ps(a, a, a);
         x = _mm256_movemask_epi8(_mm256_castps_si256(a));")

gdn_tier(avx512
  FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c
  FILES src/kernels/recur_avx512.c src/kernels/chunk_avx512.c
  PROBE "__m512 a = _mm512_set1_ps((float)argc); a = _mm512_and_ps(a, _mm512_fmadd_ps(a, a, a));
         x = (int)_mm512_movepi16_mask(_mm512_castps_si512(a)) + (int)_mm256_movepi8_mask(_mm256_set1_epi8(1));")

set(avx512bf16 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mavx512bf16)
gdn_tier(avx512bf16
  FLAGS ${avx512bf16}
  FILES src/kernels/chunk_avx512bf16.c
  PROBE "__m512 a = _mm512_set1_ps((float)argc); __m512bh b = _mm512_cvtne2ps_pbh(a, a);
         a = _mm512_dpbf16_ps(a, b, b); x = (int)_mm512_cvtss_f32(a);")

gdn_tier(amx
  FLAGS ${avx512bf16} -mamx-tile -mamx-bf16
  FILES src/kernels/chunk_amx.c
  PROBE "_tile_loadd(1, argv, 64); _tile_zero(0); _tile_zero(2); _tile_dpbf16ps(0, 1, 2); _tile_release();")
