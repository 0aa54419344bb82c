/* Parses the format of `spec` and of commands, and the types of values that both use. Values are not copied: a record points into
 * the bytes of the file. The keys are in spec.c and commands.c. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "clock.h"
#include "protocol.h"
#include "records.h"
#include "text.h"

#define MAX_SECONDS 1000000000ull

static enum parse take_line(struct records *r, size_t longest, char **line) {
    char *end = memchr(r->at, '\n', r->left < longest ? r->left : longest);
    if (!end)
        return r->left < longest ? TORN : MALFORMED;
    *end = 0;
    *line = r->at;
    r->left -= (size_t)(end + 1 - r->at);
    r->at = end + 1;
    return strlen(*line) == (size_t)(end - *line) ? RECORD : MALFORMED;
}

enum parse take_record(struct records *r, struct record *out) {
    char *line;
    uint64_t length;
    enum parse parsed = take_line(r, 64, &line);
    if (parsed != RECORD)
        return parsed;
    char *space = strchr(line, ' ');
    if (!space || space == line)
        return MALFORMED;
    *space = 0;
    if (!parse_number(space + 1, MAX_SPEC, &length))
        return MALFORMED;
    if (r->left < length + 1)
        return TORN;
    if (r->at[length] != '\n' || memchr(r->at, 0, length))
        return MALFORMED;
    r->at[length] = 0;
    *out = (struct record){.key = line, .value = r->at, .length = length};
    r->at += length + 1;
    r->left -= length + 1;
    if (strcmp(line, "end") == 0)
        return length == 0 && r->left == 0 ? END : MALFORMED;
    return RECORD;
}

/* Read and check the first line, "<kind> <version>". */
enum parse take_title(struct records *r, const char *kind, char *why, size_t room) {
    char *line;
    size_t length = strlen(kind);
    enum parse parsed = take_line(r, 40, &line);
    if (parsed == TORN)
        return TORN;
    if (parsed != RECORD || strncmp(line, kind, length) != 0 || line[length] != ' ') {
        snprintf(why, room, "not a %s", kind);
        return MALFORMED;
    }
    if (strcmp(line + length + 1, VERSION_TEXT) != 0) {
        snprintf(why, room, "%s version %.20s, and this supervisor reads version " VERSION_TEXT, kind, line + length + 1);
        return MALFORMED;
    }
    return RECORD;
}

bool take_key(const struct key *keys, size_t count, void *base, const struct record *r) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(keys[i].name, r->key) == 0)
            return keys[i].set(r->value, (char *)base + keys[i].at);
    return false;
}

static bool set_number(const char *text, uint64_t most, void *into) {
    uint64_t value;
    if (!parse_number(text, most, &value))
        return false;
    memcpy(into, &value, sizeof value);
    return true;
}

bool set_count(char *value, void *into) { return set_number(value, INT64_MAX, into) && strspn(value, "0") != strlen(value); }
bool set_duration(char *value, void *into) { return set_number(value, MAX_SECONDS * SECOND, into); }
bool set_deadline(char *value, void *into) { return set_number(value, INT64_MAX / 2, into); }
bool set_id(char *value, void *into) { return set_number(value, UINT32_MAX - 1, into); }

/* Set true for the second of two words, false for the first. */
static bool set_choice(const char *value, const char *no, const char *yes, bool *into) {
    *into = strcmp(value, yes) == 0;
    return *into || strcmp(value, no) == 0;
}

bool set_flag(char *value, void *into) { return set_choice(value, "0", "1", into); }
bool set_clock(char *value, void *into) { return set_choice(value, CLOCK_NAME_BOOTTIME, CLOCK_NAME_REALTIME, into); }

bool set_word(char *value, void *into) {
    *(char **)into = value;
    return *value && strlen(value) <= MAX_WORD;
}

bool set_folder(char *value, void *into) {
    *(char **)into = value;
    return *value == '/';
}

bool set_entry(char *value, void *into) { return *value != '=' && strchr(value, '=') && push(into, value); }
bool set_argument(char *value, void *into) { return push(into, value); }
