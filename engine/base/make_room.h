// MakeRoom: memory for what is appended next, so that appending itself cannot fail half-way.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace flashquant {

// After it `count` more elements can be appended without taking memory. Grows like push_back does,
// by a factor. Changes no element; std::bad_alloc leaves `vector` as it is.
template <typename T>
void MakeRoom(size_t count, std::vector<T>* vector) {
  const size_t wanted = vector->size() + count;
  if (wanted > vector->capacity()) vector->reserve(std::max(wanted, 2 * vector->capacity()));
}

}  // namespace flashquant
