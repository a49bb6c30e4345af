// The kernels as this process runs them: they read the same parameters as a GPU's.
#pragma once

#include <string>

namespace fake_gpu {

// False: no device would launch it like this.
bool run_kernel(const std::string& name, const void* parameters, unsigned blocks, unsigned threads, const void* stream);

}  // namespace fake_gpu
