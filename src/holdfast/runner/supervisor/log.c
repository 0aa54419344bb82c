/* Writes `log`: frames of stdout, stderr and events. With --copy each frame is also written to our stdout as a line of base64,
 * because an engine's log may not keep bytes that are not UTF-8. The output is read in output.c.
 *
 * A frame is a header of 32 bytes and then the bytes, little endian, in one write:
 *   "HFF1", u8 stream (1 stdout, 2 stderr, 3 events), u8 0, u16 task, u32 length,
 *   u32 CRC-32 of the other header bytes, u64 offset within the stream, u64 wall clock in µs
 * The offset counts every byte that the child wrote, including those that were not kept. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "attempt.h"
#include "clock.h"
#include "files.h"
#include "log.h"

#define COPY_CHUNK 8192 /* so that a line of base64 stays below 16 KiB, at which engines split lines */
#define COPY_ROOM 65536
#define EVENT_ROOM 7168

static struct {
    int fd;
    bool copy;
    unsigned task; /* of the frames to come, from 0 */
    uint64_t length, offsets[4], lost[4], dropped[4];
    bool capped;
    int error;
} log_ = {.fd = -1};

static struct {
    char *data; /* lines that are not written to stdout yet */
    size_t size, used;
    uint64_t lost;
} copying;

static unsigned char event_data[HEADER + EVENT_ROOM];
static struct text event_text = {.data = (char *)event_data + HEADER, .size = EVENT_ROOM};

/* On failure, errno says why. */
bool open_log(void) {
    struct stat about;
    log_.fd = openat(folder, "log", O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (log_.fd >= 0 && (fstat(log_.fd, &about) < 0 || (about.st_size && ftruncate(log_.fd, 0) < 0)))
        close_fd(&log_.fd);
    int error = errno;
    if (log_.fd < 0)
        snprintf(failure, sizeof failure, "cannot open the log: %s", strerror(error));
    errno = error;
    return log_.fd >= 0;
}

void number_frames(unsigned task) { log_.task = task; }
size_t output_chunk(void) { return log_.copy ? COPY_CHUNK : CHUNK; }

static void put_le(unsigned char *at, uint64_t value, int bytes) {
    for (int i = 0; i < bytes; i++)
        at[i] = (unsigned char)(value >> (8 * i));
}

static uint32_t crc32(uint32_t crc, const unsigned char *data, size_t length) {
    for (crc = ~crc; length--; data++) {
        crc ^= *data;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

static void fill_header(unsigned char *h, int stream, uint64_t offset, size_t length) {
    memcpy(h, "HFF1", 4);
    h[4] = (unsigned char)stream;
    h[5] = 0;
    put_le(h + 6, log_.task, 2);
    put_le(h + 8, length, 4);
    put_le(h + 16, offset, 8);
    put_le(h + 24, (uint64_t)walltime(), 8);
    put_le(h + 12, crc32(crc32(0, h, 12), h + 16, 16), 4);
}

void start_copy(void) {
    copying.size = COPY_ROOM;
    copying.data = malloc(copying.size);
    log_.copy = copying.data != NULL;
    fcntl(STDOUT_FILENO, F_SETFL, fcntl(STDOUT_FILENO, F_GETFL) | O_NONBLOCK);
}

void flush_copy(void) {
    while (copying.used) {
        ssize_t n = write(STDOUT_FILENO, copying.data, copying.used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno != EAGAIN) { /* the reader is gone */
            copying.lost += copying.used;
            copying.used = 0;
        }
        if (n <= 0)
            return;
        copying.used -= (size_t)n;
        memmove(copying.data, copying.data + n, copying.used);
    }
}

/* Return whether the buffer has room for one more full frame and a few events. If not, we do not read, and the child has to wait. */
bool copy_has_room(void) { return !log_.copy || copying.used < copying.size / 2; }

bool copy_pending(void) { return copying.used > 0; }

static void copy_frame(const unsigned char *data, size_t length) {
    static const char DIGITS[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t needed = (length + 2) / 3 * 4 + 1;
    flush_copy();
    if (needed > copying.size - copying.used) {
        copying.lost += needed;
        return;
    }
    char *at = copying.data + copying.used;
    for (size_t i = 0; i < length; i += 3) {
        uint32_t three = (uint32_t)data[i] << 16;
        if (i + 1 < length)
            three |= (uint32_t)data[i + 1] << 8;
        if (i + 2 < length)
            three |= data[i + 2];
        *at++ = DIGITS[three >> 18];
        *at++ = DIGITS[three >> 12 & 63];
        *at++ = i + 1 < length ? DIGITS[three >> 6 & 63] : '=';
        *at++ = i + 2 < length ? DIGITS[three & 63] : '=';
    }
    *at++ = '\n';
    copying.used += needed;
    flush_copy();
}

void finish_copy(void) {
    micros until = boottime() + FLUSH_SECONDS;
    while (copying.used && boottime() < until) {
        struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
        poll(&out, 1, 100);
        flush_copy();
    }
    copying.lost += copying.used;
}

/* Write one frame. `room` has HEADER free bytes before the payload. Bytes that cannot be written are counted as lost. */
static void write_frame(unsigned char *room, int stream, size_t length) {
    size_t whole = HEADER + length;
    fill_header(room, stream, log_.offsets[stream], length);
    log_.offsets[stream] += length;
    ssize_t n;
    do
        n = pwrite(log_.fd, room, whole, (off_t)log_.length);
    while (n < 0 && errno == EINTR);
    if (n == (ssize_t)whole) {
        log_.length += whole;
    } else {
        log_.error = n < 0 ? errno : ENOSPC;
        log_.lost[stream] += length;
        if (n > 0 && ftruncate(log_.fd, (off_t)log_.length) < 0)
            log_.error = errno;
    }
    if (log_.copy)
        copy_frame(room, whole);
}

struct text *event(const char *name) {
    event_text.used = 0;
    put(&event_text, "{\"event\":\"%s\",\"boottime\":%" PRId64, name, boottime());
    return &event_text;
}

void send_event(void) {
    if (log_.fd < 0)
        return;
    put(&event_text, "}");
    write_frame(event_data, EVENT, event_text.used);
}

/* Write output up to the cap (0: no cap), and count the bytes above it. `room` is as in write_frame. */
void keep_output(unsigned char *room, int stream, size_t length, uint64_t cap) {
    uint64_t kept = log_.offsets[OUT] + log_.offsets[ERR] - log_.dropped[OUT] - log_.dropped[ERR];
    uint64_t left = cap ? (kept < cap ? cap - kept : 0) : UINT64_MAX;
    size_t keep = length < left ? length : (size_t)left;
    if (keep)
        write_frame(room, stream, keep);
    if (keep == length)
        return;
    log_.offsets[stream] += length - keep;
    log_.dropped[stream] += length - keep;
    if (!log_.capped) {
        log_.capped = true;
        put(event("output_capped"), ",\"cap\":%" PRIu64, cap);
        send_event();
    }
}

/* Write the exit record as the last line of the copy, so that a reader of the engine's log need not fetch the file. It is not in
 * `log`. It is left out if it does not fit, or if nothing reads the copy. */
void copy_end(const struct text *end) {
    if (!log_.copy || copying.lost || end->used + 128 > EVENT_ROOM)
        return;
    put(event("exit"), ",\"exit\":%.*s}", (int)end->used - 1, end->data);
    fill_header(event_data, EVENT, log_.offsets[EVENT], event_text.used);
    copy_frame(event_data, HEADER + event_text.used);
    finish_copy();
}

void put_log(struct text *t) {
    put(t, ",\"log_length\":%" PRIu64 ",\"stdout_length\":%" PRIu64 ",\"stderr_length\":%" PRIu64, log_.length, log_.offsets[OUT],
        log_.offsets[ERR]);
    put(t, ",\"stdout_dropped\":%" PRIu64 ",\"stderr_dropped\":%" PRIu64, log_.dropped[OUT], log_.dropped[ERR]);
    put(t, ",\"log_lost\":%" PRIu64 ",\"copy_lost\":%" PRIu64, log_.lost[OUT] + log_.lost[ERR] + log_.lost[EVENT], copying.lost);
    put_field(t, "log_error", log_.error ? strerror(log_.error) : "");
}
