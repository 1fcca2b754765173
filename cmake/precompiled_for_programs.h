// What nearly every example and bench includes.
#pragma once

#include <torch/torch.h>

#include "cmake/precompiled.h"
