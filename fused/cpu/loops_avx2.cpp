#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "fused/cpu/loops.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define ZEROPAGE_LOOPS kLoopsWithAvx2
#define ZEROPAGE_PART_LANES 8
#include "fused/cpu/loops_text.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
