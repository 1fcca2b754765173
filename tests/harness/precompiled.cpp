// Carries the precompiled header; has nothing of its own.
#include "tests/harness/precompiled.h"
