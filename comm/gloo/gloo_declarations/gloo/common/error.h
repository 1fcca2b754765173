// Empty on purpose: see ../README.md.
#pragma once
