// Work of a copy engine: the scheduler does it at a random time, in random order.
#pragma once
#include <functional>

namespace cpu_gpu {

void later(std::function<void()> work);

}  // namespace cpu_gpu
