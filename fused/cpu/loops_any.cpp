#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "fused/cpu/loops.h"

#define ZEROPAGE_LOOPS kLoopsOnAnyProcessor
#define ZEROPAGE_PART_LANES 4
#include "fused/cpu/loops_text.h"
