// The network between nodes. It carries a put in pieces, at random times and in random order. Other puts may overtake it. Its word arrives
// after its bytes. That is all that the transports of this library promise.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <string>

namespace cpu_gpu {

// Drops all puts, and forgets all memory.
void reset_network(int num_ranks);

// Whether puts are in flight, or relays may have some.
bool has_network();

// Does a piece of work, if some is due in this turn. Returns whether it did.
bool carry(uint64_t turn);

// Whether no work is left but that of stalled puts and ranks.
bool network_is_idle(uint64_t turn);

// Stalls a random rank until this turn: no put that it sends or receives moves.
void stall_network(uint64_t until);

// Ends all stalls. Returns whether puts are in flight.
bool end_stalls();

// Lists what is in flight.
std::string describe_network();

// Reports an error, as `fail` does, where no kernel runs.
void stop(const std::string& text);

}  // namespace cpu_gpu
