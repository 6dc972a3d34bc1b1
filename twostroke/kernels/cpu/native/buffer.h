// Memory for rows that is reused from step to step.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace twostroke {

// Grows to the longest batch seen.
template <class T>
class Buffer {
  public:
    T *rows(int64_t count, int64_t stride) {
        const size_t wanted = size_t(count * stride);
        if (wanted > size_) {
            const size_t bytes = (wanted * sizeof(T) + 63) / 64 * 64;
            data_.reset((T *)std::aligned_alloc(64, bytes));
            if (!data_) throw std::bad_alloc();
            std::memset(data_.get(), 0, bytes);  // the padding of rows stays zero
            size_ = wanted;
        }
        return data_.get();
    }

  private:
    struct Free {
        void operator()(T *at) const { std::free(at); }
    };
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

}  // namespace twostroke
