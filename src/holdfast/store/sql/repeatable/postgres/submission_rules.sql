-- revision: 2
-- What may be in the fields of a submission. Written by `make schema` from the types in Python; do not edit.
-- `expected` is how an error message names the type; `null` says that null stands for a field that is left out.
CREATE OR REPLACE FUNCTION holdfast.submission_rules() RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $rules$ SELECT $json$
{
 "job": {
  "type": "struct",
  "expected": "object",
  "fields": {
   "runner": {"type": "str","expected": "str","min_length": 1,"max_length": 63},
   "spec": {"type": "map","expected": "object","keys": {"type": "str","expected": "str"},"values": {"type": "any","expected": "any"}},
   "id": {"type": "str","expected": "str | null","null": true},
   "tenant": {"type": "str","expected": "str | null","min_length": 1,"max_length": 200,"null": true},
   "kind": {"type": "str","expected": "str","min_length": 1,"max_length": 200},
   "queue": {"type": "str","expected": "str | null","min_length": 1,"max_length": 200,"null": true},
   "lane": {"type": "str","expected": "str | null","min_length": 1,"max_length": 200,"null": true},
   "priority": {"type": "int","expected": "int","ge": -1000000,"le": 1000000},
   "labels": {"type": "map","expected": "object","keys": {"type": "str","expected": "str","min_length": 1,"max_length": 200},"values": {"type": "str","expected": "str","max_length": 256},"max_length": 64},
   "inputs": {"type": "map","expected": "object","keys": {"type": "str","expected": "str"},"values": {"type": "any","expected": "any"}},
   "needs": {"type": "array","expected": "array","items": {"type": "str","expected": "str"},"max_length": 1000},
   "hold": {"type": "bool","expected": "bool"},
   "available_at": {"type": "datetime","expected": "datetime | null","null": true},
   "max_attempts": {"type": "int","expected": "int | null","ge": 1,"le": 1000,"null": true},
   "retry": {"type": "struct","expected": "object | null","fields": {"base": {"type": "float","expected": "float"},"cap": {"type": "float","expected": "float"},"on": {"type": "array","expected": "array","items": {"type": "enum","expected": "str","values": ["failed","timed_out"]}}},"required": [],"null": true},
   "on_lost": {"type": "enum","expected": "str","values": ["fail","hold","pause","requeue"]},
   "timeout": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true},
   "queue_timeout": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true},
   "idle_timeout": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true},
   "stop_grace": {"type": "float","expected": "float | null","ge": 0.0,"le": 86400.0,"null": true},
   "stop_after": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true},
   "budget": {"type": "map","expected": "object | null","keys": {"type": "str","expected": "str","min_length": 1,"max_length": 200},"values": {"type": "float","expected": "float","ge": 0.0},"null": true},
   "secrets": {"type": "array","expected": "array","items": {"type": "str","expected": "str","min_length": 1,"max_length": 200}},
   "uploads": {"type": "array","expected": "array","items": {"type": "str","expected": "str","min_length": 1,"max_length": 200},"max_length": 100},
   "check": {"type": "struct","expected": "object | null","fields": {"command": {"type": "array","expected": "array","items": {"type": "str","expected": "str"}},"timeout": {"type": "float","expected": "float"}},"required": ["command","timeout"],"null": true},
   "reuse_key": {"type": "str","expected": "str | null","min_length": 1,"max_length": 200,"null": true},
   "rebuild": {"type": "bool","expected": "bool"},
   "tasks": {"type": "array","expected": "array","items": {"type": "struct","expected": "object","fields": {"name": {"type": "str","expected": "str","min_length": 1,"max_length": 64},"command": {"type": "array","expected": "array | null","items": {"type": "str","expected": "str","max_length": 32768},"min_length": 1,"max_length": 4096,"null": true},"sql": {"type": "str","expected": "str | null","min_length": 1,"max_length": 4096,"null": true},"files": {"type": "array","expected": "array","items": {"type": "str","expected": "str","min_length": 1,"max_length": 4096},"max_length": 1000},"env": {"type": "map","expected": "object","keys": {"type": "str","expected": "str","min_length": 1,"max_length": 200},"values": {"type": "str","expected": "str","max_length": 32768}},"timeout": {"type": "float","expected": "float | null","gt": 0.0,"le": 316224000.0,"null": true}},"required": ["name"]}},
   "connector": {"type": "str","expected": "str | null","min_length": 1,"max_length": 63,"null": true},
   "snapshot": {"type": "enum","expected": "str | null","values": ["always","final","none"],"null": true},
   "base": {"type": "str","expected": "str | null","null": true}
  },
  "required": [
   "runner",
   "spec"
  ]
 },
 "function": {
  "type": "struct",
  "expected": "object",
  "fields": {
   "name": {"type": "str","expected": "str","min_length": 1,"max_length": 200}
  },
  "required": [
   "name"
  ]
 },
 "limits": {
  "jobs": 10000,
  "key": 128,
  "bytes": 1048576,
  "first_year": 1970,
  "last_year": 9000,
  "arguments": 4096,
  "argument": 32768,
  "check_seconds": 86400.0
 },
 "backoff": {
  "base": 5.0,
  "cap": 300.0
 }
}
$json$::jsonb $rules$;
