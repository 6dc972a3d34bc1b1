#include "parts.h"

TWOSTROKE_EXPORT void twostroke_join(twostroke::Parts *parts) {
    parts->multiply_codes = twostroke::multiply_codes;
    parts->widen_fp8 = twostroke::widen_fp8;
    parts->gather_stored = twostroke::gather_stored;
}
