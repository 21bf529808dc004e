/* Base64 (RFC 4648 §4) between memory and memory: standard alphabet, padding required, no bits left over.
   The caller has checked that the bytes are there. It knows nothing of Python. */

#ifndef HEADRACE_BASE64_H
#define HEADRACE_BASE64_H

#include <stdint.h>
#include <stddef.h>

#define HR_B64_BAD 0x80

static const uint8_t hr_b64_values[256] = {
#define BAD8 HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD
    BAD8, BAD8, BAD8, BAD8,
    BAD8, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, 62, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, 63,
    52, 53, 54, 55, 56, 57, 58, 59, 60, 61, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD,
    HR_B64_BAD, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
    15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD,
    HR_B64_BAD, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40,
    41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD, HR_B64_BAD,
    BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8, BAD8,
#undef BAD8
};

static const char hr_b64_letters[64] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* How many bytes a text stands for; -1 if it is not Base64. */
static inline ptrdiff_t hr_b64_size(const uint8_t *text, ptrdiff_t n) {
    uint8_t bad = 0;
    ptrdiff_t i, whole, pads = 0;
    if (n == 0) return 0;
    if (n & 3) return -1;
    if (text[n - 1] == '=') pads = text[n - 2] == '=' ? 2 : 1;
    whole = n - (pads ? 4 : 0);
    for (i = 0; i + 4 <= whole; i += 4)
        bad |= hr_b64_values[text[i]] | hr_b64_values[text[i + 1]] | hr_b64_values[text[i + 2]]
             | hr_b64_values[text[i + 3]];
    if (pads) {
        const uint8_t *last = text + whole;
        bad |= hr_b64_values[last[0]] | hr_b64_values[last[1]];
        if (pads == 1) {
            bad |= hr_b64_values[last[2]];
            if (hr_b64_values[last[2]] & 3) return -1;
        } else if (hr_b64_values[last[1]] & 15) {
            return -1;
        }
    }
    return bad & HR_B64_BAD ? -1 : n / 4 * 3 - pads;
}

/* How many bytes a text stands for that hr_b64_size() has found good. */
static inline ptrdiff_t hr_b64_known_size(const uint8_t *text, ptrdiff_t n) {
    if (n == 0) return 0;
    return n / 4 * 3 - (text[n - 1] == '=') - (text[n - 2] == '=');
}

/* Those bytes. */
static inline void hr_b64_decode(uint8_t *out, const uint8_t *text, uint64_t n) {
    uint64_t i, whole;
    uint32_t v;
    if (n == 0) return;
    whole = n - (text[n - 1] == '=' ? 4 : 0);
    for (i = 0; i < whole; i += 4, out += 3) {
        v = ((uint32_t)hr_b64_values[text[i]] << 18) | ((uint32_t)hr_b64_values[text[i + 1]] << 12)
          | ((uint32_t)hr_b64_values[text[i + 2]] << 6) | hr_b64_values[text[i + 3]];
        out[0] = (uint8_t)(v >> 16);
        out[1] = (uint8_t)(v >> 8);
        out[2] = (uint8_t)v;
    }
    if (whole < n) {
        const uint8_t *last = text + whole;
        v = ((uint32_t)hr_b64_values[last[0]] << 18) | ((uint32_t)hr_b64_values[last[1]] << 12);
        out[0] = (uint8_t)(v >> 16);
        if (last[2] != '=') {
            v |= (uint32_t)hr_b64_values[last[2]] << 6;
            out[1] = (uint8_t)(v >> 8);
        }
    }
}

static inline uint64_t hr_b64_length(uint64_t n) { return (n + 2) / 3 * 4; }

/* The text of n bytes: hr_b64_length(n) characters. */
static inline void hr_b64_encode(uint8_t *out, const uint8_t *data, uint64_t n) {
    uint64_t i;
    uint32_t v;
    for (i = 0; i + 3 <= n; i += 3, out += 4) {
        v = ((uint32_t)data[i] << 16) | ((uint32_t)data[i + 1] << 8) | data[i + 2];
        out[0] = (uint8_t)hr_b64_letters[v >> 18];
        out[1] = (uint8_t)hr_b64_letters[(v >> 12) & 63];
        out[2] = (uint8_t)hr_b64_letters[(v >> 6) & 63];
        out[3] = (uint8_t)hr_b64_letters[v & 63];
    }
    if (i < n) {
        v = (uint32_t)data[i] << 16;
        if (i + 1 < n) v |= (uint32_t)data[i + 1] << 8;
        out[0] = (uint8_t)hr_b64_letters[v >> 18];
        out[1] = (uint8_t)hr_b64_letters[(v >> 12) & 63];
        out[2] = (uint8_t)(i + 1 < n ? hr_b64_letters[(v >> 6) & 63] : '=');
        out[3] = '=';
    }
}

#endif
