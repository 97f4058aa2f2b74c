// Work of something that is no thread, such as a copy engine: it is done at a random time, in random order.
#pragma once
#include <functional>

namespace cpu_gpu {

void later(std::function<void()> work);

}  // namespace cpu_gpu
