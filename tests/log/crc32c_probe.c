/* Makes both implementations of crc32c.h callable from tests, whatever this CPU has. It knows nothing of the log. */
#include "crc32c.h"

uint32_t record_crc(int hardware, uint32_t state, const void *record, const void *payload, size_t n) {
    hr_crc32c_setup(hardware);
    return hr_crc32c_record(state, record, payload, n);
}

uint32_t plain_crc(int hardware, uint32_t state, const void *data, size_t n) {
    hr_crc32c_setup(hardware);
    return hr_crc32c(state, data, n);
}
