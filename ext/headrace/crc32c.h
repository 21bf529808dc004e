/* CRC-32C (Castagnoli) over memory, with the fastest way this CPU has, chosen at run time. Works on the raw register:
   callers give the starting state, so a seed costs nothing. */
#ifndef HEADRACE_CRC32C_H
#define HEADRACE_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define HR_CRC_HARDWARE 1
#define HR_CRC_TARGET __attribute__((target("sse4.2")))
#define HR_CRC_U64(c, v) ((uint32_t)_mm_crc32_u64((c), (v)))
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
#define HR_CRC_U8(c, v) __crc32cb((c), (v))
#endif

/* Three streams of HR_CRC_STRIDE bytes run side by side in hardware: the instruction takes three cycles but one can
   start every cycle. hr_crc_shift moves a register over one stride of zeros, to join them. */
#define HR_CRC_STRIDE 128

static uint32_t hr_crc_table[8][256];
static uint32_t hr_crc_shift[4][256];
static uint32_t (*hr_crc32c)(uint32_t state, const void *data, size_t n);

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

#ifdef HR_CRC_HARDWARE
static inline uint32_t hr_crc_over_stride(uint32_t c) {
    return hr_crc_shift[0][c & 255] ^ hr_crc_shift[1][(c >> 8) & 255] ^ hr_crc_shift[2][(c >> 16) & 255] ^
           hr_crc_shift[3][c >> 24];
}

HR_CRC_TARGET static uint32_t hr_crc32c_hardware(uint32_t state, const void *data, size_t n) {
    const uint8_t *p = (const uint8_t *)data;
    while (n >= 3 * HR_CRC_STRIDE) {
        uint32_t a = state, b = 0, c = 0;
        for (int i = 0; i < HR_CRC_STRIDE; i += 8) {
            uint64_t x, y, z;
            memcpy(&x, p + i, 8);
            memcpy(&y, p + HR_CRC_STRIDE + i, 8);
            memcpy(&z, p + 2 * HR_CRC_STRIDE + i, 8);
            a = HR_CRC_U64(a, x);
            b = HR_CRC_U64(b, y);
            c = HR_CRC_U64(c, z);
        }
        state = hr_crc_over_stride(hr_crc_over_stride(a) ^ b) ^ c;
        p += 3 * HR_CRC_STRIDE;
        n -= 3 * HR_CRC_STRIDE;
    }
    while (n >= 8) {
        uint64_t x;
        memcpy(&x, p, 8);
        state = HR_CRC_U64(state, x);
        p += 8;
        n -= 8;
    }
    while (n--) state = HR_CRC_U8(state, *p++);
    return state;
}

static int hr_crc_has_hardware(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
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
#ifdef HR_CRC_HARDWARE
    if (hardware && hr_crc_has_hardware()) {
        static const uint8_t zeros[HR_CRC_STRIDE];
        for (int byte = 0; byte < 4; byte++)
            for (uint32_t i = 0; i < 256; i++)
                hr_crc_shift[byte][i] = hr_crc32c_portable(i << (8 * byte), zeros, HR_CRC_STRIDE);
        hr_crc32c = hr_crc32c_hardware;
    }
#else
    (void)hardware;
#endif
}

#endif
