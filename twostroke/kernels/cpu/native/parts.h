// Kernels that most workers never call, in separate libraries. Each is compiled and loaded when something first needs
// it. The folder of a part holds its sources, which are compiled with those of `SHARED` in
// `twostroke/kernels/cpu/build.py`.

#pragma once

#include "attend_bytes.h"
#include "attend_nibbles.h"
#include "latents.h"
#include "stored.h"

namespace twostroke {

// The functions of parts. They are null until the part is loaded, and nothing may call them before.
struct Parts {
    decltype(&twostroke::attend_bytes) attend_bytes;
    decltype(&twostroke::attend_nibbles) attend_nibbles;
    decltype(&twostroke::multiply_codes) multiply_codes;
    decltype(&twostroke::widen_fp8) widen_fp8;
    decltype(&twostroke::gather_stored) gather_stored;
    decltype(&twostroke::store_latents) store_latents;
    decltype(&twostroke::attend_latents) attend_latents;
};

}  // namespace twostroke

// Every part exports it. It sets the part's functions.
TWOSTROKE_EXPORT void twostroke_join(twostroke::Parts *parts);
