// A target that has a precompiled header needs a source.
