// Work of a copy engine: the scheduler does it at a random time, in random order.
#pragma once
#include <functional>

namespace cpu_gpu {

void later(std::function<void()> work);

// Forgets the copies of all threads. Threads that end have no copies left, but those of a run that is dropped may.
void forget_bulk_copies();

}  // namespace cpu_gpu
