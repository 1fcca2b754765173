// The public API in one include. Installed, it is <zero/zeropage.h>.
#pragma once

#include "comm/world.h"
#include "memory/ledger.h"
#include "memory/memory_table.h"
#include "zero/data_parallel.h"
#include "zero/gathered_parameters.h"
#include "zero/optimizer.h"
#include "zero/options.h"
