// Operators that LibTorch's C++ library lacks on the meta device.
//
// On the meta device an operator computes sizes and no values. PyTorch has many of those in Python
// only; here are the ones that transformers and small convolution nets need: embeddings, attention,
// layer and batch norm, equal, where, relu, mean squared error, convolution. Attention and LSTM keep what the
// host's kernels do. Others end in LibTorch's words "attempted to
// run this operator with Meta tensors".
#pragma once

namespace zeropage::operators {

// Adds them to the dispatcher, once a process. Threads: any.
void provide_meta_operators();

}  // namespace zeropage::operators
