/* The file `log`: frames of output and events. Implemented in log.c. */
#ifndef LOG_H
#define LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "clock.h"
#include "text.h"

enum { OUT = 1, ERR = 2, EVENT = 3 };

#define HEADER 32
#define CHUNK 65536             /* the largest payload of output */
#define FLUSH_SECONDS (5 * SECOND) /* how long we wait for a reader of the copy */

bool open_log(void);
void number_frames(unsigned task);
size_t output_chunk(void);
void keep_output(unsigned char *room, int stream, size_t length, uint64_t cap);

struct text *event(const char *name);
void send_event(void);

void start_copy(void);
bool copy_has_room(void);
bool copy_pending(void);
void flush_copy(void);
void finish_copy(void);
void copy_end(const struct text *end);

void put_log(struct text *t);

#endif
