/* CRC-32C (Castagnoli) over memory, with the fastest way this CPU has, chosen at run time. Works on the raw register:
   callers give the starting state, so a seed costs nothing. */
#ifndef HEADRACE_CRC32C_H
#define HEADRACE_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HR_CRC_HARDWARE 1
#define HR_CRC_TARGET __attribute__((target("sse4.2,pclmul")))
#define HR_CRC_U64(c, v) ((uint32_t)_mm_crc32_u64((c), (v)))
#define HR_CRC_U32(c, v) _mm_crc32_u32((c), (v))
#define HR_CRC_U8(c, v) _mm_crc32_u8((c), (v))
#elif defined(__aarch64__)
#include <arm_acle.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#define HR_CRC_HARDWARE 1
#if defined(__ARM_FEATURE_CRC32)
#define HR_CRC_TARGET
#else
#define HR_CRC_TARGET __attribute__((target("+crc")))
#endif
#define HR_CRC_U64(c, v) __crc32cd((c), (v))
#define HR_CRC_U32(c, v) __crc32cw((c), (v))
#define HR_CRC_U8(c, v) __crc32cb((c), (v))
#endif

static uint32_t hr_crc_table[8][256];
#ifdef __x86_64__
/* The instruction takes three cycles but one can start every cycle, so three streams of up to HR_CRC_STRIDE bytes run
   side by side. hr_crc_power[i] is x^(64 i - 33) modulo the polynomial: multiplied with it without carries and reduced
   by one more instruction, a register has moved over 8 i bytes of zeros. */
#define HR_CRC_STRIDE 256
static uint32_t hr_crc_power[2 * HR_CRC_STRIDE / 8 + 1];
#endif
static uint32_t (*hr_crc32c)(uint32_t state, const void *data, size_t n);

/* The checksum of a log record without headers and parts: 44 bytes of `record` from its length field on, then `payload`
   and zeros up to a multiple of 8. The payload is read where it came from: the bytes just copied behind the header are
   still on their way to memory, in pieces that do not match the loads, and waiting for them costs more than all the rest. */
static uint32_t (*hr_crc32c_record)(uint32_t state, const void *record, const void *payload, size_t n);

static uint32_t hr_crc32c_portable(uint32_t state, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    while (n >= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= state;
        state = hr_crc_table[7][w & 255] ^ hr_crc_table[6][(w >> 8) & 255] ^ hr_crc_table[5][(w >> 16) & 255] ^
                hr_crc_table[4][(w >> 24) & 255] ^ hr_crc_table[3][(w >> 32) & 255] ^ hr_crc_table[2][(w >> 40) & 255] ^
                hr_crc_table[1][(w >> 48) & 255] ^ hr_crc_table[0][w >> 56];
        p += 8;
        n -= 8;
    }
    while (n--) state = (state >> 8) ^ hr_crc_table[0][(state ^ *p++) & 255];
    return state;
}

static uint32_t hr_crc32c_record_portable(uint32_t state, const void *record, const void *payload, size_t n) {
    static const uint8_t zeros[8];
    state = hr_crc32c_portable(state, (const uint8_t *)record + 4, 44);
    state = hr_crc32c_portable(state, payload, n);
    return hr_crc32c_portable(state, zeros, (0 - n) & 7);
}

#ifdef HR_CRC_HARDWARE
static inline uint64_t hr_load_u64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static inline uint32_t hr_load_u32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

HR_CRC_TARGET static uint32_t hr_crc32c_hardware(uint32_t state, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
#ifdef __x86_64__
    while (n >= 72) { /* below that, joining the streams costs more than it saves */
        size_t words = n >= 3 * HR_CRC_STRIDE ? HR_CRC_STRIDE / 8 : n / 24;
        const uint8_t *q = p + 8 * words, *r = q + 8 * words;
        uint32_t a = state, b = 0, c = 0;
        __m128i moved;
        for (size_t i = 0; i < 8 * words; i += 8) {
            a = HR_CRC_U64(a, hr_load_u64(p + i));
            b = HR_CRC_U64(b, hr_load_u64(q + i));
            c = HR_CRC_U64(c, hr_load_u64(r + i));
        }
        moved = _mm_xor_si128(
            _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)a), _mm_cvtsi32_si128((int)hr_crc_power[2 * words]), 0),
            _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)b), _mm_cvtsi32_si128((int)hr_crc_power[words]), 0));
        state = HR_CRC_U64(0, (uint64_t)_mm_cvtsi128_si64(moved)) ^ c;
        p += 24 * words;
        n -= 24 * words;
    }
#endif
    while (n >= 8) {
        state = HR_CRC_U64(state, hr_load_u64(p));
        p += 8;
        n -= 8;
    }
    if (n >= 4) {
        state = HR_CRC_U32(state, hr_load_u32(p));
        p += 4;
        n -= 4;
    }
    while (n--) state = HR_CRC_U8(state, *p++);
    return state;
}

HR_CRC_TARGET static uint32_t hr_crc32c_record_hardware(uint32_t state, const void *record, const void *payload, size_t n) {
    const uint8_t *h = (const uint8_t *)record, *p = (const uint8_t *)payload;
    size_t rest = n & 7, words = n / 8;
    state = HR_CRC_U32(state, hr_load_u32(h + 4));
    for (int i = 8; i < 48; i += 8) state = HR_CRC_U64(state, hr_load_u64(h + i));
#ifdef __x86_64__
    if (words >= 4 && words <= 2 * HR_CRC_STRIDE / 8) {
        /* Header, first and second half of the payload side by side. */
        size_t half = words / 2;
        const uint8_t *q = p + 8 * (words - half);
        uint32_t b = 0, c = 0;
        __m128i moved;
        for (size_t i = 0; i < 8 * half; i += 8) {
            b = HR_CRC_U64(b, hr_load_u64(p + i));
            c = HR_CRC_U64(c, hr_load_u64(q + i));
        }
        if (words & 1) b = HR_CRC_U64(b, hr_load_u64(p + 8 * half));
        moved = _mm_xor_si128(
            _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)state), _mm_cvtsi32_si128((int)hr_crc_power[words]), 0),
            _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)b), _mm_cvtsi32_si128((int)hr_crc_power[half]), 0));
        state = HR_CRC_U64(0, (uint64_t)_mm_cvtsi128_si64(moved)) ^ c;
    } else
#endif
        state = hr_crc32c_hardware(state, p, n - rest);
    if (rest) {
        uint64_t last = 0;
        if (n >= 8)
            last = hr_load_u64(p + n - 8) >> (8 * (8 - rest));
        else
            for (size_t i = rest; i-- > 0;) last = last << 8 | p[i];
        state = HR_CRC_U64(state, last);
    }
    return state;
}

static int hr_crc_has_hardware(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#elif defined(__linux__)
    return (getauxval(AT_HWCAP) & (1 << 7)) != 0; /* HWCAP_CRC32 */
#else
    return 1; /* every 64-bit Apple CPU */
#endif
}
#endif

/* Fills the tables and picks the implementation; `hardware` 0 forces the portable one. */
static void hr_crc32c_setup(int hardware) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = (c >> 1) ^ (0x82f63b78u & (0u - (c & 1)));
        hr_crc_table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            hr_crc_table[k][i] = (hr_crc_table[k - 1][i] >> 8) ^ hr_crc_table[0][hr_crc_table[k - 1][i] & 255];
    hr_crc32c = hr_crc32c_portable;
    hr_crc32c_record = hr_crc32c_record_portable;
#ifdef HR_CRC_HARDWARE
    if (hardware && hr_crc_has_hardware()) {
#ifdef __x86_64__
        uint32_t power = 0x80000000u; /* x^0; the lowest bit is the highest power */
        for (int exponent = 0; exponent <= 64 * (2 * HR_CRC_STRIDE / 8) - 33; exponent++) {
            if ((exponent + 33) % 64 == 0) hr_crc_power[(exponent + 33) / 64] = power;
            power = (power >> 1) ^ (0x82f63b78u & (0u - (power & 1)));
        }
#endif
        hr_crc32c = hr_crc32c_hardware;
        hr_crc32c_record = hr_crc32c_record_hardware;
    }
#else
    (void)hardware;
#endif
}

#endif
