/* The format of `spec` and of commands: a title line, then records of "key length\nbytes\n", ended by "end 0\n\n". The keys are in
 * spec.c and commands.c. Implemented in records.c. */
#ifndef RECORDS_H
#define RECORDS_H

#include <stdbool.h>
#include <stddef.h>

#define MAX_SPEC (8u << 20)

struct record {
    char *key, *value;
    size_t length;
};

struct records {
    char *at;
    size_t left;
};

enum parse { RECORD, END, TORN, MALFORMED };

enum parse take_title(struct records *r, const char *kind, char *why, size_t room);
enum parse take_record(struct records *r, struct record *out);

/* The name of a key, the function that checks and stores its value, and the offset of the value in its struct. */
struct key {
    const char *name;
    bool (*set)(char *value, void *into);
    size_t at;
};

bool take_key(const struct key *keys, size_t count, void *base, const struct record *r);

/* Functions that store a value. Each comment gives the value, and the type that `into` points to. */
bool set_count(char *value, void *into);    /* a number above 0; uint64_t */
bool set_duration(char *value, void *into); /* microseconds; micros */
bool set_deadline(char *value, void *into); /* microseconds since the boot or since 1970; micros */
bool set_id(char *value, void *into);       /* a user, a group, a number of 32 bits; int64_t */
bool set_flag(char *value, void *into);     /* 0 or 1; bool */
bool set_clock(char *value, void *into);    /* a clock's name; bool, true for the wall clock */
bool set_word(char *value, void *into);     /* a short text; char * */
bool set_folder(char *value, void *into);   /* an absolute path; char * */
bool set_entry(char *value, void *into);    /* NAME=value; struct strings */
bool set_argument(char *value, void *into); /* anything; struct strings */

#endif
