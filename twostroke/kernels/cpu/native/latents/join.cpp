#include "parts.h"

TWOSTROKE_EXPORT void twostroke_join(twostroke::Parts *parts) {
    parts->store_latents = twostroke::store_latents;
    parts->attend_latents = twostroke::attend_latents;
}
