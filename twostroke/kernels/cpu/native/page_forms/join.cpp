#include "parts.h"

TWOSTROKE_EXPORT void twostroke_join(twostroke::Parts *parts) {
    parts->attend_bytes = twostroke::attend_bytes;
    parts->attend_nibbles = twostroke::attend_nibbles;
}
