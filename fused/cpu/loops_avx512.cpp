#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "fused/cpu/loops.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif
#define ZEROPAGE_LOOPS kLoopsWithAvx512
#define ZEROPAGE_PART_LANES 16
#include "fused/cpu/loops_text.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
